// Draws every figure when it comes into view, and makes the drawings answer to the keyboard.
const root = document.documentElement;
const { specs, colours } = JSON.parse(document.getElementById("drawings").textContent);

// Rows are written as columns, and their texts as places in a list, which is a fifth as long.
function unfolded(data) {
  if (!data.columns) return data;
  const columns = Object.entries(data.columns);
  const value = (key, v) => (data.texts[key] ? data.texts[key][v] : v);
  return columns[0][1].map((_, i) => Object.fromEntries(columns.map(([key, all]) => [key, value(key, all[i])])));
}

// On a narrow screen labels stand over their curves rather than beside them.
function narrow(layer) {
  if (layer.layer) return { ...layer, layer: layer.layer.map(narrow) };
  if (layer.mark.style !== "end") return layer;
  return { ...layer, mark: { ...layer.mark, align: "right", dx: -2, dy: -9 } };
}

function fitted(whole, width) {
  const spec =
    width >= 520
      ? whole
      : {
          ...(whole.layer ? narrow(whole) : { ...whole, concat: whole.concat.map(narrow) }),
          room: Math.min(whole.room, whole.axis),
        };
  const fit = (panel, room) => ({ ...panel, width: Math.max(140, room) });
  if (!spec.concat) return fit(spec, width - spec.room);
  const columns = Math.max(1, Math.min(spec.columns, Math.floor(width / spec.least)));
  const room = (width - 28 * (columns - 1)) / columns - spec.room;
  return { ...spec, columns, concat: spec.concat.map((panel) => fit(panel, room)) };
}

async function draw(box) {
  const spec = structuredClone(specs[box.dataset.spec]);
  spec.datasets = Object.fromEntries(
    Object.entries(spec.datasets).map(([name, data]) => [name, unfolded(data)]),
  );
  await window.vegaEmbed(box, fitted(spec, box.clientWidth), {
    logLevel: 1, // a layer that a pointer fills is empty at first
    ast: true, // no text becomes code
    renderer: "svg",
    actions: false,
    tooltip: { theme: "custom" },
  });
  const drawing = box.querySelector("svg");
  drawing.setAttribute("tabindex", "0");
  drawing.setAttribute("aria-label", `${box.dataset.title} Arrow keys read values, + and - zoom, Escape resets.`);
  for (const name of box.querySelectorAll(".vega-bind-name")) {
    const colour = colours[name.textContent];
    colour?.forEach((tone, i) => name.parentNode.style.setProperty(["--curve", "--curve-dark"][i], tone));
  }
  readByKeys(drawing);
  box.dataset.drawn = "";
}

// A pointer that keys move: what is shown under a real one is shown under this one.
function readByKeys(drawing) {
  const at = { x: null, y: null };
  drawing.addEventListener("keydown", (event) => {
    const plot = drawing.querySelector(".role-frame .background").getBoundingClientRect();
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const zoom = { "+": -120, "=": -120, "-": 120 }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey || !(step || zoom || event.key === "Escape")) return;
    event.preventDefault();
    at.x ??= plot.left + plot.width / 2;
    at.y ??= plot.top + plot.height / 2;
    if (step) {
      const length = event.shiftKey ? 40 : 8;
      at.x = Math.min(Math.max(at.x + length * step[0], plot.left + 1), plot.right - 1);
      at.y = Math.min(Math.max(at.y + length * step[1], plot.top + 1), plot.bottom - 1);
    }
    const where = { clientX: at.x, clientY: at.y, bubbles: true, cancelable: true };
    const under = document.elementFromPoint(at.x, at.y);
    const target = under && drawing.contains(under) ? under : drawing;
    if (event.key === "Escape") target.dispatchEvent(new MouseEvent("dblclick", where));
    else if (zoom) target.dispatchEvent(new WheelEvent("wheel", { ...where, deltaY: zoom, ctrlKey: true }));
    else target.dispatchEvent(new PointerEvent("pointermove", where));
  });
}

const seen = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting || !entry.target.clientWidth) continue;
      seen.unobserve(entry.target);
      draw(entry.target);
    }
  },
  { rootMargin: "400px" },
);
for (const box of document.querySelectorAll(".plot")) seen.observe(box);

// The scheme: what the button, or the address of a page that holds this one, says; else the system's.
const isDark = matchMedia("(prefers-color-scheme: dark)");
function paint(scheme) {
  root.dataset.scheme = scheme || (isDark.matches ? "dark" : "light");
}
const asked = () => paint(location.hash.match(/^#(light|dark)$/)?.[1]);
isDark.addEventListener("change", asked);
addEventListener("hashchange", asked);
asked();
document.getElementById("scheme")?.addEventListener("click", () => {
  paint(root.dataset.scheme === "dark" ? "light" : "dark");
});
document.getElementById("open-claims")?.addEventListener("click", () => {
  for (const claim of document.querySelectorAll(".claim")) claim.open = true;
});
