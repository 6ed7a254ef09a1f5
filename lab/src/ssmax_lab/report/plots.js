// What every plot of the page is made of: numbers in words, colours, Chart and HeatMap.
"use strict";

const payload = JSON.parse(document.getElementById("payload").textContent);

const SVG = "http://www.w3.org/2000/svg";
const DASHES = { "-": "", "--": "7 5", ":": "1 5", "-.": "9 5 1 5" };
const SHAPES = { "whole number": "disc", "first digit": "triangle", wrong: "cross" };
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
const html = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

// Steady digits keep a column of values in line; others lose their trailing zeros.
function show(value, digits = 4, steady = false) {
  if (value === null || value === undefined) return "\u2013";
  const size = Math.abs(value);
  let text;
  if (Number.isInteger(value) || size >= 10 ** digits)
    text = Math.round(value).toLocaleString("en-US");
  else if (size < 1e-4) text = value.toExponential(2);
  else if (steady) text = value.toPrecision(digits);
  else
    text = Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 8 });
  return text.replaceAll("-", "\u2212");
}

// Words with _ for what stands below and ^ for what stands above, as in p_n and n^0.5.
function worded(text, inSvg = false) {
  return text.split(/([_^][-\w.]+)/).map((part) => {
    if (!/^[_^]./.test(part)) return part;
    if (!inSvg) return html(part[0] === "_" ? "sub" : "sup", {}, part.slice(1));
    // Not every browser knows baseline-shift; dy holds to the end of the text, where these stand.
    const dy = part[0] === "_" ? "0.3em" : "-0.5em";
    return svg("tspan", { dy, "font-size": "75%" }, part.slice(1));
  });
}

const words = (text, x, y, anchor = "start", kind = "") =>
  svg("text", { class: kind, x, y, "text-anchor": anchor }, ...worded(text, true));

function rgb(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}
function luminance(colour) {
  const [r, g, b] = colour.map((v) => (v <= 10 ? v / 3295 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
const mix = (from, to, share) => from.map((v, i) => v + (to[i] - v) * share);
const css = (colour) => `rgb(${colour.map(Math.round).join(" ")})`;

// Colours are chosen for white paper: on dark paper black turns into the ink, the others are
// lightened until their contrast is 4.5.
function paint(hex) {
  const colour = rgb(hex);
  if (luminance(colour) < 0.01) return "var(--ink)";
  let share = 0;
  while ((luminance(mix(colour, [255, 255, 255], share)) + 0.05) / 0.057 < 4.5) share += 0.05;
  return `light-dark(${hex}, ${css(mix(colour, [255, 255, 255], share))})`;
}
function look(name) {
  const found = (payload.looks || {})[name] || { label: name, colour: "#777777", dash: "-" };
  return { name, label: found.label, colour: paint(found.colour), dash: found.dash };
}
const shade = (colour, percent) => `color-mix(in srgb, ${colour} ${percent}%, var(--paper))`;

// Interpolates between colours evenly spread over 0..1.
function ramp(stops) {
  const colours = stops.map(rgb);
  return (share) => {
    const place = clamp(share, 0, 1) * (colours.length - 1);
    const index = Math.min(Math.floor(place), colours.length - 2);
    return mix(colours[index], colours[index + 1], place - index);
  };
}
const CIVIDIS = "#00224e #1a386f #434e6c #61656f #7d7c78 #9b9476 #bcae6c #dec958 #fee838";
const cividis = ramp(CIVIDIS.split(" "));
const diverging = ramp(["#2166ac", "#92c5de", "#f4f4f4", "#f4a582", "#b2382b"]);

function ticks(kind, [low, high], count) {
  const decades = Math.log10(high / low);
  if (kind === "log" && decades >= 1) {
    const factors = decades < 2.5 ? [1, 2, 5] : [1];
    const every = Math.max(1, Math.ceil(decades / count));
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
      if (power % every) continue;
      for (const factor of factors) found.push(factor * 10 ** power);
    }
    return found.filter((v) => v >= low * 0.999 && v <= high * 1.001).map((v) => [v, power10(v)]);
  }
  const rough = (high - low) / count;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough * 0.999);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) {
    const value = i * step || 0; // never -0
    const text = value.toLocaleString("en-US", {
      minimumFractionDigits: digits,
      maximumFractionDigits: digits,
    });
    found.push([value, text.replace("-", "\u2212")]);
  }
  return found;
}
function power10(value) {
  const power = Math.round(Math.log10(value));
  if ((power < 5 && power > -3) || Math.abs(value / 10 ** power - 1) > 1e-9) return show(value);
  return `10^${power}`;
}
function scale(kind, domain, [from, to]) {
  const forward = kind === "log" ? Math.log10 : (v) => v;
  const back = kind === "log" ? (v) => 10 ** v : (v) => v;
  const [low, high] = domain.map(forward);
  return {
    to: (value) => from + ((forward(value) - low) / (high - low)) * (to - from),
    back: (pixel) => back(low + ((pixel - from) / (to - from)) * (high - low)),
  };
}

// Buttons of which one is pressed; choose is told its index.
function switcher(title, names, chosen, choose) {
  const group = html("div", { class: "switch", role: "group", "aria-label": title }, `${title} `);
  const buttons = names.map((name, index) =>
    html("button", { type: "button", onclick: () => press(index) }, name),
  );
  const mark = (index) =>
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", i === index));
  const press = (index) => {
    mark(index);
    choose(index);
  };
  mark(chosen);
  group.append(...buttons);
  return group;
}

function shapePath(shape, x, y, r) {
  if (shape === "triangle") return `M${x} ${y - r}l${r} ${1.8 * r}h${-2 * r}z`;
  if (shape === "cross")
    return `M${x - r} ${y - r}l${2 * r} ${2 * r}M${x + r} ${y - r}l${-2 * r} ${2 * r}`;
  return `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`;
}
function shapeOf(shape, x, y, r, colour) {
  const style = { stroke: colour, fill: shape === "disc" ? colour : "none" };
  return svg("path", { class: "shape", d: shapePath(shape, x, y, r), style });
}
function swatch(series) {
  const style = { stroke: series.colour };
  const line = svg("path", {
    d: "M1 5H25",
    "stroke-dasharray": DASHES[series.dash] ?? "",
    "stroke-width": 2.2,
    "stroke-linecap": "round",
    style,
  });
  return svg(
    "svg",
    { viewBox: "0 0 26 10", "aria-hidden": "true" },
    series.line === false ? shapeOf("disc", 13, 5, 3, series.colour) : line,
  );
}

// A box that says what stands under the pointer; what the two kinds of plot share.
class Tip {
  constructor(canvas) {
    this.canvas = canvas;
    this.box = html("div", { class: "tip", role: "status" });
    canvas.append(this.box);
  }
  show(title, rows, x, y = 0) {
    const lines = rows.map((row) =>
      html(
        "div",
        {},
        html("i", { style: { background: row.colour } }),
        html("span", {}, ...worded(row.label)),
        html("output", {}, row.value),
      ),
    );
    this.box.replaceChildren(html("b", {}, ...worded(title)), ...lines);
    const width = this.box.offsetWidth;
    const room = this.canvas.clientWidth;
    const left = x > room / 2 ? x - width - 14 : x + 14;
    Object.assign(this.box.style, {
      left: `${clamp(left, 0, Math.max(0, room - width))}px`,
      top: `${y}px`,
    });
  }
  hide() {
    this.box.replaceChildren();
  }
}

// Lines and points over one x: { title, x: { label, kind, domain },
// y: { label, kind, domain, zero },
// series: [{ name, label, colour, dash, x, y, line, thin, dots, shapes, notes, off }],
// marks: [{ x, label, line: 0 or below, dots: [{ y, colour }] }], controls: [element] }.
class Chart {
  static count = 0;

  constructor(box, spec) {
    this.spec = spec;
    this.hidden = new Set(spec.series.filter((series) => series.off).map((series) => series.name));
    this.zoom = null;
    this.cursor = null;
    this.clip = `clip-${(Chart.count += 1)}`;
    this.legend = html("div", { class: "legend", role: "group", "aria-label": "shown" });
    this.resetButton = html(
      "button",
      { type: "button", class: "reset", onclick: () => this.reset() },
      "Reset",
    );
    const keys = "Arrow keys read values, plus and minus zoom, Escape resets.";
    const name = `${spec.title}: ${spec.y.label} against ${spec.x.label}. ${keys}`;
    this.svg = svg("svg", { tabindex: 0, role: "application", "aria-label": name });
    this.canvas = html("div", { class: "canvas line" }, this.svg);
    this.tip = new Tip(this.canvas);
    this.canvas.append(this.resetButton);
    if (spec.controls) box.append(html("div", { class: "controls" }, ...spec.controls));
    box.append(this.legend, this.canvas);
    this.listen();
    this.fillLegend();
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  update(changes) {
    Object.assign(this.spec, changes);
    this.fillLegend();
    this.draw();
  }

  set(axis, kind) {
    this.spec[axis].kind = kind;
    this.draw();
  }

  fillLegend() {
    const key = JSON.stringify(this.spec.series.map((series) => [series.name, series.label]));
    // Rebuilding an unchanged legend would take the focus from its buttons.
    if (key === this.legendKey) return;
    this.legendKey = key;
    this.legend.replaceChildren(
      ...this.spec.series.map((series) =>
        html(
          "button",
          {
            type: "button",
            "data-name": series.name,
            "aria-pressed": !this.hidden.has(series.name),
            onclick: (event) => this.toggle(series.name, event.currentTarget),
          },
          swatch(series),
          html("span", {}, ...worded(series.label)),
        ),
      ),
    );
  }

  toggle(name, button) {
    if (!this.hidden.delete(name)) this.hidden.add(name);
    button.setAttribute("aria-pressed", !this.hidden.has(name));
    this.draw();
  }

  reset() {
    this.zoom = null;
    this.draw();
  }

  get visible() {
    return this.spec.series.filter((series) => !this.hidden.has(series.name));
  }

  points(series, domain = [-Infinity, Infinity]) {
    const low = {
      x: this.spec.x.kind === "log" ? 0 : -Infinity,
      y: this.spec.y.kind === "log" ? 0 : -Infinity,
    };
    const found = series.x.map((x, i) => ({ x, y: series.y[i], i }));
    return found.filter(
      (p) => p.y !== null && p.x > low.x && p.y > low.y && p.x >= domain[0] && p.x <= domain[1],
    );
  }

  domains() {
    const all = this.spec.series.flatMap((series) => this.points(series));
    let x = this.zoom || this.spec.x.domain || extent(all.map((p) => p.x)) || [1, 10];
    if (x[0] === x[1]) x = [x[0] - 0.5, x[1] + 0.5];
    if (this.spec.y.domain) return { x, y: this.spec.y.domain };
    const shown = this.visible.flatMap((series) => this.points(series, x));
    let y = extent((shown.length ? shown : all).map((p) => p.y)) || [1, 10];
    if (this.spec.y.zero) y = [Math.min(0, y[0]), y[1]];
    const log = this.spec.y.kind === "log";
    const pad = log ? (y[1] / y[0]) ** 0.05 : (y[1] - y[0]) * 0.05 || 0.5;
    const floor = this.spec.y.zero ? y[0] : y[0] - pad;
    return { x, y: log ? [y[0] / pad, y[1] * pad] : [floor, y[1] + pad] };
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    const height = Math.round(clamp(width * 0.62, 280, 430));
    const { x: xDomain, y: yDomain } = this.domains();
    const area = { left: 46, right: width - 16, top: 38, bottom: height - 42 };
    const x = scale(this.spec.x.kind, xDomain, [area.left, area.right]);
    const y = scale(this.spec.y.kind, yDomain, [area.bottom, area.top]);
    Object.assign(this, { area, x, y, xDomain });
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    this.overlay = svg("g", { "pointer-events": "none" });
    const clip = svg(
      "clipPath",
      { id: this.clip },
      svg("rect", {
        x: area.left - 5,
        y: area.top - 5,
        width: area.right - area.left + 10,
        height: area.bottom - area.top + 10,
      }),
    );
    const curves = svg(
      "g",
      { "clip-path": `url(#${this.clip})` },
      ...this.visible.map((series) => this.curve(series)),
    );
    this.svg.replaceChildren(
      clip,
      this.axes(xDomain, yDomain, width, height),
      curves,
      this.drawMarks(),
      this.overlay,
    );
    this.resetButton.disabled = !this.zoom;
    this.drawCursor();
  }

  axes(xDomain, yDomain, width, height) {
    const { area, x, y } = this;
    const group = svg("g", { class: "axes" });
    for (const [value, text] of ticks(this.spec.y.kind, yDomain, height / 55)) {
      group.append(svg("path", { class: "grid", d: `M${area.left} ${y.to(value)}H${area.right}` }));
      group.append(words(text, area.left - 8, y.to(value) + 4, "end", "y-tick"));
    }
    for (const [value, text] of ticks(this.spec.x.kind, xDomain, clamp(width / 70, 3, 9))) {
      group.append(svg("path", { class: "base", d: `M${x.to(value)} ${area.bottom}v4` }));
      group.append(words(text, x.to(value), area.bottom + 18, "middle", "x-tick"));
    }
    group.append(svg("path", { class: "base", d: `M${area.left} ${area.bottom}H${area.right}` }));
    group.append(words(this.spec.y.label, 0, 12, "start", "title"));
    group.append(words(this.spec.x.label, area.right, height - 6, "end", "title"));
    return group;
  }

  curve(series) {
    const { x, y } = this;
    const group = svg("g", { class: "series", "data-series": series.name });
    const points = this.points(series);
    if (series.line !== false) {
      // A value that is missing interrupts the line.
      const steps = points.map((p, i) => {
        const move = i && p.i === points[i - 1].i + 1 ? "L" : "M";
        return `${move}${x.to(p.x).toFixed(1)} ${y.to(p.y).toFixed(1)}`;
      });
      group.append(
        svg("path", {
          class: series.thin ? "line thin" : "line",
          d: steps.join(""),
          "stroke-dasharray": DASHES[series.dash] ?? "",
          style: { stroke: series.colour },
        }),
      );
    }
    if (series.dots || series.shapes) {
      for (const p of points) {
        const shape = series.shapes ? series.shapes[p.i] : "disc";
        group.append(shapeOf(shape, x.to(p.x), y.to(p.y), series.dots || 3.2, series.colour));
      }
    }
    return group;
  }

  drawMarks() {
    const { area, x } = this;
    const group = svg("g", { class: "marks" });
    for (const mark of this.spec.marks || []) {
      const place = x.to(mark.x);
      if (place < area.left || place > area.right) continue;
      for (const dot of mark.dots || [])
        group.append(
          svg("circle", {
            cx: place,
            cy: this.y.to(dot.y),
            r: 5,
            style: { fill: dot.colour, stroke: "var(--paper)", strokeWidth: 2 },
          }),
        );
      if (!mark.label) continue;
      const left = place > (area.left + area.right) / 2;
      group.prepend(svg("path", { class: "mark", d: `M${place} ${area.top - 18}V${area.bottom}` }));
      const [shift, anchor] = left ? [-6, "end"] : [6, "start"];
      group.append(words(mark.label, place + shift, area.top - 9 + 14 * (mark.line || 0), anchor));
    }
    return group;
  }

  // Every x of what is shown, in order: where the cursor can stand.
  stops() {
    const points = this.visible.flatMap((series) => this.points(series, this.xDomain));
    return [...new Set(points.map((p) => p.x))].sort((a, b) => a - b);
  }

  drawCursor(selection) {
    this.overlay.replaceChildren();
    const { area, x, y } = this;
    if (selection) {
      const [from, to] = selection;
      this.overlay.append(
        svg("rect", {
          class: "selection",
          x: from,
          y: area.top,
          width: to - from,
          height: area.bottom - area.top,
        }),
      );
    }
    if (this.cursor === null || this.cursor < this.xDomain[0] || this.cursor > this.xDomain[1])
      return this.tip.hide();
    const rows = [];
    const dots = [];
    for (const series of this.visible) {
      const points = this.points(series, this.xDomain);
      const nearest = points.reduce(
        (best, p) =>
          !best || Math.abs(p.x - this.cursor) < Math.abs(best.x - this.cursor) ? p : best,
        null,
      );
      if (!nearest || this.cursor < points[0].x || this.cursor > points.at(-1).x) continue;
      const where = nearest.x === this.cursor ? "" : ` at ${show(nearest.x)}`;
      const note = series.notes ? `, ${series.notes[nearest.i]}` : "";
      rows.push({
        colour: series.colour,
        label: series.label,
        value: show(nearest.y, 4, true) + note + where,
      });
      dots.push(
        svg("circle", {
          cx: x.to(nearest.x),
          cy: y.to(nearest.y),
          r: 4,
          style: { fill: series.colour, stroke: "var(--paper)" },
        }),
      );
    }
    const place = x.to(this.cursor);
    this.overlay.append(
      svg("path", { class: "cursor", d: `M${place} ${area.top}V${area.bottom}` }),
      ...dots,
    );
    return this.tip.show(
      `${this.spec.x.label.split(",")[0]} ${show(this.cursor)}`,
      rows,
      place,
      area.top,
    );
  }

  listen() {
    let start = null;
    const place = (event) =>
      clamp(event.clientX - this.svg.getBoundingClientRect().left, this.area.left, this.area.right);
    const between = (event) => [Math.min(start, place(event)), Math.max(start, place(event))];
    const read = (event) => {
      this.cursor = nearestTo(this.stops(), this.x.back(place(event)), this.x.to);
      this.drawCursor(start === null ? undefined : between(event));
    };
    this.svg.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      start = place(event);
      this.svg.setPointerCapture(event.pointerId);
      read(event);
    });
    this.svg.addEventListener("pointermove", read);
    this.svg.addEventListener("pointerup", (event) => {
      if (start !== null && Math.abs(place(event) - start) > 8)
        this.zoomTo(between(event).map(this.x.back));
      start = null;
      this.drawCursor();
    });
    const leave = () => {
      start = null;
      this.cursor = null;
      this.drawCursor();
    };
    this.svg.addEventListener("pointercancel", leave);
    this.svg.addEventListener("pointerleave", unlessTouch(leave));
    this.svg.addEventListener("blur", leave);
    this.svg.addEventListener("dblclick", () => this.reset());
    this.svg.addEventListener("keydown", (event) => this.press(event));
  }

  press(event) {
    const stops = this.stops();
    const index = stops.indexOf(this.cursor);
    const step = event.shiftKey ? 10 : 1;
    const to = (i) => {
      this.cursor = stops[clamp(i, 0, stops.length - 1)] ?? null;
      this.drawCursor();
    };
    const middle =
      this.cursor === null ? (this.area.left + this.area.right) / 2 : this.x.to(this.cursor);
    const around = (share) =>
      [middle - (middle - this.area.left) * share, middle + (this.area.right - middle) * share].map(
        this.x.back,
      );
    const keys = {
      ArrowRight: () => to(index + step),
      ArrowLeft: () => to(index < 0 ? stops.length - 1 : index - step),
      Home: () => to(0),
      End: () => to(stops.length - 1),
      Escape: () => this.reset(),
      "+": () => this.zoomTo(around(0.5)),
      "=": () => this.zoomTo(around(0.5)),
      "-": () => this.zoomTo(around(2)),
    };
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    keys[event.key]();
    event.preventDefault();
  }

  zoomTo([low, high]) {
    const before = this.zoom;
    this.zoom = null;
    const [first, last] = this.domains().x;
    const range = [Math.max(low, first), Math.min(high, last)];
    // Fewer than two values would leave nothing to see.
    const seen = this.visible.some((series) => this.points(series, range).length > 1);
    if (range[0] > first || range[1] < last) this.zoom = seen ? range : before;
    this.draw();
  }
}

// A finger that is lifted leaves, but what it asked for is still to be read.
function unlessTouch(leave) {
  return (event) => {
    if (event.pointerType !== "touch") leave();
  };
}
function extent(values) {
  if (!values.length) return null;
  return values.reduce(
    ([low, high], v) => [Math.min(low, v), Math.max(high, v)],
    [Infinity, -Infinity],
  );
}
function nearestTo(values, at, to) {
  return values.reduce(
    (best, v) =>
      best === null || Math.abs(to(v) - to(at)) < Math.abs(to(best) - to(at)) ? v : best,
    null,
  );
}

// Numbers on coloured cells: { title, rows, columns, rowTitle, columnTitle, values, colour, text,
// tip(row, column) -> [title, rows], legend: [gradient, [[share, text]]] }.
class HeatMap {
  constructor(box, spec) {
    this.spec = spec;
    this.here = null;
    this.svg = svg("svg", {
      tabindex: 0,
      role: "application",
      "aria-label": `${spec.title}. Arrow keys read cells.`,
    });
    this.canvas = html("div", { class: "canvas" }, this.svg);
    this.tip = new Tip(this.canvas);
    this.ramp = html("div", { class: "ramp" });
    box.append(this.canvas, this.ramp);
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  update(spec) {
    this.spec = spec;
    this.here = null;
    this.draw();
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    const { rows, columns } = this.spec;
    const longest = (names) => Math.max(...names.map((name) => name.length)) * 7;
    const left = longest(rows) + 12;
    const cell = {
      width: Math.min((width - left) / columns.length, 90),
      height: clamp((width * 0.45) / rows.length, 24, 36),
    };
    const turned = longest(columns) > cell.width - 4;
    const bottom = 24 + rows.length * cell.height;
    const height = bottom + (turned ? longest(columns) * 0.75 + 36 : 40);
    Object.assign(this, { left, cell });
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    const right = left + columns.length * cell.width;
    const group = svg(
      "g",
      {},
      words(this.spec.rowTitle, 0, 12, "start", "title"),
      words(this.spec.columnTitle, right, height - 4, "end", "title"),
    );
    rows.forEach((name, row) => {
      group.append(words(name, left - 8, 24 + (row + 0.5) * cell.height + 4, "end"));
      columns.forEach((_, column) => group.append(...this.drawCell(row, column)));
    });
    columns.forEach((name, column) => {
      const x = left + (column + 0.5) * cell.width;
      const title = words(name, turned ? x + 4 : x, bottom + 14, turned ? "end" : "middle");
      if (turned) title.setAttribute("transform", `rotate(-45 ${x + 4} ${bottom + 14})`);
      group.append(title);
    });
    this.overlay = svg("g", { "pointer-events": "none" });
    this.svg.replaceChildren(group, this.overlay);
    this.drawLegend();
    this.point(this.here);
  }

  drawCell(row, column) {
    const { width, height } = this.cell;
    const [x, y] = [this.left + column * width, 24 + row * height];
    const value = this.spec.values[row][column];
    const paper = value === null ? null : this.spec.colour(value);
    const cell = svg("rect", {
      class: "cell",
      x: x + 0.5,
      y: y + 0.5,
      width: width - 1,
      height: height - 1,
      rx: 2,
      style: { fill: paper ? css(paper) : "var(--raised)" },
    });
    const text = words(this.spec.text(value), x + width / 2, y + height / 2 + 4, "middle", "value");
    if (paper) text.style.fill = luminance(paper) < 0.2 ? "#ffffff" : "#111111";
    if (width < 30) text.style.fontSize = "10px";
    return [cell, text];
  }

  drawLegend() {
    const [gradient, labels] = this.spec.legend;
    const names = labels.map(([share, name]) =>
      html("span", { style: { left: `${100 * share}%` } }, name),
    );
    this.ramp.replaceChildren(
      html("i", { style: { background: gradient } }),
      html("div", {}, ...names),
    );
  }

  point(here) {
    this.here = here;
    this.overlay.replaceChildren();
    if (!here) return this.tip.hide();
    const x = this.left + here.column * this.cell.width;
    const y = 24 + here.row * this.cell.height;
    this.overlay.append(
      svg("rect", { class: "here", x, y, width: this.cell.width, height: this.cell.height, rx: 2 }),
    );
    const [title, rows] = this.spec.tip(here.row, here.column);
    return this.tip.show(title, rows, x + this.cell.width / 2, y + this.cell.height + 6);
  }

  listen() {
    const last = () => ({ row: this.spec.rows.length - 1, column: this.spec.columns.length - 1 });
    const read = (event) => {
      const box = this.svg.getBoundingClientRect();
      const column = Math.floor((event.clientX - box.left - this.left) / this.cell.width);
      const row = Math.floor((event.clientY - box.top - 24) / this.cell.height);
      const inside = row >= 0 && column >= 0 && row <= last().row && column <= last().column;
      this.point(inside ? { row, column } : null);
    };
    for (const name of ["pointermove", "pointerdown"]) this.svg.addEventListener(name, read);
    this.svg.addEventListener(
      "pointerleave",
      unlessTouch(() => this.point(null)),
    );
    this.svg.addEventListener("blur", () => this.point(null));
    this.svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[
        event.key
      ];
      if (event.key === "Escape") this.point(null);
      if (!step) return;
      const from = this.here || { row: -step[0], column: -step[1] };
      this.point({
        row: clamp(from.row + step[0], 0, last().row),
        column: clamp(from.column + step[1], 0, last().column),
      });
      event.preventDefault();
    });
  }
}

function gradientOf(colours, count = 16) {
  const stops = Array.from({ length: count + 1 }, (_, i) => css(colours(i / count)));
  return `linear-gradient(to right, ${stops.join(", ")})`;
}
function thumbnail(values, colour) {
  const cells = values.flatMap((row, y) =>
    row.map((value, x) =>
      svg("rect", {
        x,
        y,
        width: 1.05,
        height: 1.05,
        style: { fill: value === null ? "var(--raised)" : css(colour(value)) },
      }),
    ),
  );
  return svg(
    "svg",
    {
      viewBox: `0 0 ${values[0].length} ${values.length}`,
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    },
    ...cells,
  );
}
// Buttons with small maps on them, of which one is pressed; fillIn draws them anew.
function thumbs(names, draw, choose) {
  const group = html("div", { class: "thumbs", role: "group", "aria-label": "configuration" });
  const buttons = names.map((name, i) => {
    const press = () => {
      choose(i);
      fillIn(i);
    };
    return html("button", { type: "button", "data-name": name, onclick: press });
  });
  const fillIn = (chosen) => {
    buttons.forEach((button, i) => {
      button.setAttribute("aria-pressed", i === chosen);
      button.replaceChildren(...draw(names[i]));
    });
  };
  group.append(...buttons);
  fillIn(0);
  return { group, fillIn };
}
