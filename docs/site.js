// Typeset formulas; let the explorer follow the scheme and its own height.
document$.subscribe(() => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const tex = element.textContent.trim();
    katex.render(tex.slice(2, -2), element, {
      displayMode: tex.startsWith("\\["),
      throwOnError: false,
    });
  }
  const explorer = document.querySelector("iframe.explorer");
  if (!explorer) return;
  const scheme = () =>
    document.body.getAttribute("data-md-color-scheme") === "slate" ? "dark" : "light";
  const tell = () => explorer.contentWindow.postMessage({ scheme: scheme() }, "*");
  const source = explorer.getAttribute("src").split("#")[0];
  explorer.setAttribute("src", `${source}#${scheme()}`);
  explorer.addEventListener("load", tell);
  new MutationObserver(tell).observe(document.body, {
    attributeFilter: ["data-md-color-scheme"],
  });
  addEventListener("message", (event) => {
    if (event.source === explorer.contentWindow && event.data.height > 0) {
      explorer.style.height = `${event.data.height}px`;
    }
  });
});
