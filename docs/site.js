// Typeset formulas; let the explorer follow the scheme.
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
  const page = explorer.getAttribute("src");
  const follow = () => {
    const isDark = document.body.getAttribute("data-md-color-scheme") === "slate";
    explorer.setAttribute("src", `${page}#${isDark ? "dark" : "light"}`);
  };
  follow();
  new MutationObserver(follow).observe(document.body, {
    attributeFilter: ["data-md-color-scheme"],
  });
});
