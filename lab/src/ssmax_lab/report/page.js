// The figures, the explorer and the buttons of the page, of the parts in plots.js.

// The formulas of figures 1 and 3. The output is that of z_max, the last entry, under softmax
// over factor z; softmax's own factor is 1.
const factorOf = (n, s, b = 0) => s * Math.log(n) + b;
const output1 = (n, factor, z) => 1 / (1 + (n - 1) * Math.exp(-factor * (z + 2)));
const output3 = (n, factor, z) => 1 / (1 + evenSum(n, factor) * Math.exp(-factor * z));
// The paper's bound, for the gap to the second largest (lower) or to the smallest entry (upper).
const bound = (n, s, gap) => 1 / ((n - 1) * n ** (-s * gap) + 1);
// Sum of exp(factor i / (n - 2)) for i = 0 .. n - 2, a geometric series.
function evenSum(n, factor) {
  if (n === 2) return 1;
  if (factor === 0) return n - 1;
  const step = factor / (n - 2);
  return Math.expm1(step * (n - 1)) / Math.expm1(step);
}
const TOPS = Array.from({ length: 201 }, (_, i) => i / 10);
const SIZES = [
  ...new Set(Array.from({ length: 241 }, (_, i) => Math.round(10 ** (i / 40)))),
].filter((n) => n > 1);
const { s: paperS, sizes: paperSizes } = payload.constants;
const softmaxLook = { ...look("a"), name: "softmax", label: "softmax" };
const ssmaxLook = { ...look("b"), name: "ssmax", label: "SSMax" };
const outputAxis = () => ({ label: "output of z_max", kind: "linear", domain: [0, 1] });

const kinds = ["linear", "log"];
// As it is called where these runs are drawn: not every run is in every plot.
const looked = (name, data) => ({ ...look(name), ...(data.label && { label: data.label }) });
const byLook = (curves, change) =>
  Object.entries(curves).map(([name, data]) => ({ ...looked(name, data), ...change(data, name) }));
// The axes of a map of all heads.
const byHead = (values) => ({
  rows: values.map((_, i) => `${i + 1}`),
  columns: values[0].map((_, i) => `${i + 1}`),
  rowTitle: "layer",
  columnTitle: "head",
  values,
});
function median(values) {
  const all = values
    .flat()
    .filter((v) => v !== null)
    .sort((p, q) => p - q);
  return (all[(all.length - 1) >> 1] + all[all.length >> 1]) / 2;
}
const ranks = (values, first = 1) => values.map((_, i) => i + first);
function markersKey() {
  const parts = Object.entries(SHAPES).map(([word, shape]) => {
    const drawn = shapeOf(shape, 6, 6, 4, "var(--quiet)");
    return html(
      "span",
      {},
      svg("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, drawn),
      word,
    );
  });
  return html("span", { class: "key" }, ...parts);
}
const note = (text) => html("span", { class: "key" }, text);
function panel(box, title) {
  const part = html("div", {}, html("h4", {}, title));
  box.append(part);
  return part;
}

const PLOTS = {
  figure1(box) {
    const sizes = SIZES.filter((n) => n <= 1e5);
    new Chart(box, {
      title: "Figure 1",
      x: { label: "n", kind: "log" },
      y: { label: "largest output", kind: "linear", domain: [0, 1] },
      series: [
        { ...softmaxLook, x: sizes, y: sizes.map((n) => output1(n, 1, 3)) },
        {
          ...ssmaxLook,
          label: `SSMax, s = ${paperS}`,
          x: sizes,
          y: sizes.map((n) => output1(n, factorOf(n, paperS), 3)),
        },
      ],
    });
  },

  figure2(box) {
    const { tables, fits = {}, first = 1 } = payload.figures[2];
    const seeds = Object.keys(tables);
    const palette = ["#D55E00", "#0072B2", "#009E73", "#CC79A7"];
    const learned = (seed, colour) => ({
      name: `p ${seed}`,
      label: `p_n, ${seed}`,
      colour,
      line: false,
      dots: 1.8,
      x: ranks(tables[seed], first),
      y: tables[seed],
    });
    const fitted = (seed, fit, colour, dash) => ({
      name: `${fit.name} ${seed}`,
      label: `${fit.name}, R\u00b2 = ${fit.r2 === null ? "\u2013" : fit.r2.toFixed(4)}`,
      colour: paint(colour),
      dash,
      x: ranks(fit.curve, first),
      y: fit.curve,
    });
    // The paper's own shape is shown at first, its rivals when asked for.
    const logFirst = (found) =>
      [...found].sort((p, q) => (q.name === "log n") - (p.name === "log n"));
    const dashes = ["-", "--", "-.", ":"];
    const one = (seed) => [
      learned(seed, "var(--ink)"),
      ...logFirst(fits[seed] || []).map((fit, i) => ({
        ...fitted(seed, fit, palette[i % 4], dashes[i % 4]),
        off: fit.name !== "log n",
      })),
    ];
    const all = () =>
      seeds.flatMap((seed, i) => [
        learned(seed, paint(palette[i % 4])),
        ...(fits[seed] || [])
          .filter((fit) => fit.name === "log n")
          .map((fit) => ({ ...fitted(seed, fit, palette[i % 4], "-"), thin: true })),
      ]);
    const choose = (i) => chart.update({ series: i < seeds.length ? one(seeds[i]) : all() });
    const controls = [switcher("n axis", kinds, 0, (i) => chart.set("x", kinds[i]))];
    if (seeds.length > 1) controls.unshift(switcher("table", [...seeds, "all"], 0, choose));
    const chart = new Chart(box, {
      title: "Figure 2",
      x: { label: "n", kind: "linear" },
      y: { label: "learned p_n", kind: "linear" },
      series: one(seeds[0]),
      controls,
    });
    for (const seed of seeds)
      for (const series of one(seed)) if (series.off) chart.hidden.add(series.name);
  },

  figure3(box) {
    box.classList.add("panels");
    const drawn = (title, base, factor, marks) =>
      new Chart(panel(box, title), {
        title: `Figure 3, ${title}`,
        x: { label: "z_max", kind: "linear" },
        y: outputAxis(),
        series: paperSizes.map((n, i) => ({
          name: `n ${n}`,
          label: `n = ${show(n)}`,
          colour: shade(base.colour, 55 + (45 * i) / (paperSizes.length - 1)),
          dash: ["-", "--", "-.", ":"][paperSizes.length - 1 - i] ?? "-",
          x: TOPS,
          y: TOPS.map((z) => output3(n, factor(n), z)),
        })),
        marks,
      });
    drawn("softmax", softmaxLook, () => 1, []);
    drawn(`SSMax, s = ${paperS}`, ssmaxLook, (n) => factorOf(n, paperS), [
      { x: 1 + 1 / paperS, label: "1 + 1/s" },
    ]);
  },

  figure4(box) {
    const { curves, less } = payload.figures[4];
    const ways = less ? [...kinds, "less (a)"] : kinds;
    const over = note("");
    const spec = (way) => {
      const isLess = way === "less (a)";
      over.textContent = isLess ? less.note : "";
      return {
        y: {
          label: isLess ? "training loss less (a)'s (nats)" : "training loss (nats)",
          kind: way === "log" ? "log" : "linear",
        },
        series: byLook(isLess ? less.curves : curves, (curve) => curve),
      };
    };
    const chart = new Chart(box, {
      title: "Figure 4",
      x: { label: "step", kind: "linear" },
      ...spec("linear"),
      controls: [switcher("loss axis", ways, 0, (i) => chart.update(spec(ways[i]))), over],
    });
  },

  figure5(box) {
    const figure = payload.figures[5];
    const bases = figure.same_theta ? [figure, figure.same_theta] : [figure];
    const state = { base: bases[0], isRelative: false };
    const over = note("");
    const spec = () => {
      const less = state.isRelative && state.base.less;
      const label = less ? "test loss less (a)'s (nats)" : "test loss (nats)";
      over.textContent = less ? less.note : "";
      const { curves } = less || state.base;
      const marks = [{ x: payload.train_length, label: "training length" }];
      const limit = state.base.rope_limit;
      if (limit) marks.push({ x: limit, label: "RoPE limit", line: 1 });
      return { y: { label, kind: "linear" }, series: byLook(curves, (curve) => curve), marks };
    };
    const change = (changes) => {
      Object.assign(state, changes);
      chart.update(spec());
    };
    const controls = [switcher("position axis", kinds, 0, (i) => chart.set("x", kinds[i])), over];
    if (bases.some((base) => base.less)) {
      const ways = ["as it is", "less (a)"];
      controls.unshift(switcher("loss", ways, 0, (i) => change({ isRelative: i === 1 })));
    }
    if (bases.length > 1) {
      const names = bases.map((base) => show(base.theta));
      controls.unshift(
        switcher("rotary base at test", names, 0, (i) => change({ base: bases[i] })),
      );
    } else if (figure.theta) controls.unshift(note(`rotary base ${show(figure.theta)} at test`));
    const chart = new Chart(box, {
      title: "Figure 5",
      x: { label: "position", kind: "linear" },
      ...spec(),
      controls,
    });
  },

  figure6(box) {
    const { maps } = payload.figures[6];
    const names = Object.keys(maps);
    const state = { name: names[0], key: "whole" };
    const count = note("");
    const write = (share) => (share === null ? "\u2013" : String(Math.round(100 * share)));
    const mean = (values) => {
      const all = values.flat().filter((v) => v !== null);
      return all.reduce((sum, v) => sum + v, 0) / all.length;
    };
    const spec = () => {
      const map = maps[state.name];
      count.textContent = `${map.trials} trials a cell`;
      const beside = (row, column) =>
        names.map((name) => {
          const other = maps[name];
          const place = [
            other.depths.indexOf(map.depths[row]),
            other.lengths.indexOf(map.lengths[column]),
          ];
          return {
            ...looked(name, other),
            value: place.includes(-1)
              ? "\u2013"
              : `${write(other[state.key][place[0]][place[1]])} %`,
          };
        });
      return {
        title: `Figure 6, ${looked(state.name, map).label}`,
        rows: map.depths.map((depth) => `${Math.round(100 * depth)} %`),
        columns: map.lengths.map((length) => show(length)),
        rowTitle: "depth of the needle",
        columnTitle: "context size",
        values: map[state.key],
        colour: cividis,
        text: write,
        tip: (row, column) => [
          `context ${show(map.lengths[column])}, depth ${Math.round(100 * map.depths[row])} %`,
          beside(row, column),
        ],
        legend: [
          gradientOf(cividis),
          [
            [0, "0"],
            [0.5, "50"],
            [1, "100 %"],
          ],
        ],
      };
    };
    const small = (name) => [
      thumbnail(maps[name][state.key], cividis),
      looked(name, maps[name]).label,
      html("br"),
      html("b", {}, `${write(mean(maps[name][state.key]))} %`),
    ];
    const choose = (i) => {
      state.name = names[i];
      heat.update(spec());
    };
    const tabs = thumbs(names, small, choose);
    const digits = switcher("counted", ["whole number", "first digit"], 0, (i) => {
      state.key = ["whole", "first"][i];
      tabs.fillIn(names.indexOf(state.name));
      heat.update(spec());
    });
    box.append(html("div", { class: "controls" }, digits, count), tabs.group);
    const heat = new HeatMap(box, spec());
  },

  figure7(box) {
    const { heads, length } = payload.figures[7];
    new Chart(box, {
      title: "Figure 7",
      x: { label: "head, by rank", kind: "linear" },
      y: { label: "needle score", kind: "linear", zero: true },
      series: byLook(heads, (head, name) => ({
        label: `${looked(name, head).label}: ${head.answer}`,
        x: ranks(head.y),
        y: head.y,
        shapes: head.y.map(() => SHAPES[head.answer]),
      })),
      controls: [markersKey(), note(`context ${show(length)}`)],
    });
  },

  figure8(box) {
    const { trials, length } = payload.figures[8];
    new Chart(box, {
      title: "Figure 8",
      x: { label: "trial, by rank, % of all", kind: "linear" },
      y: { label: "top needle score", kind: "linear", zero: true },
      series: byLook(trials, (trial) => ({
        x: ranks(trial.y).map((rank) => (100 * rank) / trial.y.length),
        y: trial.y,
        notes: trial.answers,
        shapes: trial.answers.map((answer) => SHAPES[answer]),
        thin: true,
      })),
      controls: [markersKey(), note(`context ${show(length)}`)],
    });
  },

  scales(box) {
    const choices = Object.entries(payload.scales).flatMap(([name, found]) =>
      ["s", "b"]
        .filter((key) => found[key])
        .map((key) => ({
          called: looked(name, found),
          key,
          values: found[key],
          start: key === "s" ? found.start : 0,
        })),
    );
    const summary = html("p", { class: "summary" });
    const spec = ({ called, key, values, start }) => {
      const all = values
        .flat()
        .filter((v) => v !== null)
        .sort((p, q) => p - q);
      const reach = Math.max(...all.map((v) => Math.abs(v - start))) || 1;
      const above = all.filter((v) => v > start).length;
      const ends = `from ${show(all[0], 3)} to ${show(all.at(-1), 3)}`;
      const range = `median ${show(median(values), 3)}, ${ends}`;
      const risen = `${above} of ${all.length} above the start, ${show(start, 3)}`;
      summary.textContent = `${key} of ${called.label}: ${range}; ${risen}.`;
      return {
        title: `Learnt ${key}, ${called.label}`,
        ...byHead(values),
        colour: (value) => diverging(0.5 + (value - start) / (2 * reach)),
        text: (value) => (value === null ? "\u2013" : value.toFixed(2).replace("-", "\u2212")),
        tip: (row, column) => [
          `layer ${row + 1}, head ${column + 1}`,
          [{ ...called, label: key, value: show(values[row][column]) }],
        ],
        legend: [
          gradientOf(diverging),
          [
            [0, show(start - reach, 3)],
            [0.5, `start ${show(start, 3)}`],
            [1, show(start + reach, 3)],
          ],
        ],
      };
    };
    const names = choices.map(({ called, key }) => `${called.label}: ${key}`);
    box.append(
      html(
        "div",
        { class: "controls" },
        switcher("", names, 0, (i) => heat.update(spec(choices[i]))),
      ),
      summary,
    );
    const heat = new HeatMap(box, spec(choices[0]));
  },

  sharpness(box) {
    const n = [...new Set(Object.values(payload.sharpness).flatMap((curve) => curve.n))].sort(
      (p, q) => p - q,
    );
    const drawn = (key, title, even, y) =>
      new Chart(panel(box, title), {
        title,
        x: { label: "n", kind: "log" },
        y,
        series: [
          ...byLook(payload.sharpness, (curve) => ({ x: curve.n, y: curve[key] })),
          {
            name: "even",
            label: "spread evenly",
            colour: "var(--quiet)",
            dash: ":",
            thin: true,
            x: n,
            y: n.map(even),
          },
        ],
      });
    // Sharpness is a matter of factors; what is spread evenly soon leaves the picture.
    const measured = Object.values(payload.sharpness).flatMap((curve) => curve.largest);
    const least = Math.min(...measured.filter((v) => v > 0));
    drawn("largest", "Mean largest weight", (v) => 1 / v, {
      label: "largest weight",
      kind: "log",
      domain: [0.7 * least, 1],
    });
    drawn("entropy", "Entropy", Math.log, { label: "entropy (nats)", kind: "linear", zero: true });
  },

  sharpnessByHead(box) {
    const found = Object.fromEntries(
      Object.entries(payload.sharpness).flatMap(([name, { heads }]) => (heads ? [[name, heads]] : [])),
    );
    const names = Object.keys(found);
    const [first, last] = found[names[0]].n;
    const even = Math.log(last / first); // what attention spread evenly gains in nats
    const minus = (text) => text.replace("-", "\u2212");
    // Of a head that fades the weight falls and the entropy rises: the same colour says so.
    const views = {
      largest: {
        of: (before, after) => after / before,
        colour: (factor) => diverging(0.5 + Math.log2(factor) / 4),
        text: (factor) => factor.toFixed(2),
        marks: ["\u00d7 1/4", "\u00d7 1", "\u00d7 4"],
        tell: (all) =>
          `${all.filter((v) => v < 1).length} of ${all.length} heads are below what they were, ` +
          `${all.filter((v) => v < 0.5).length} below half of it; the median is \u00d7 ` +
          `${median(all).toFixed(2)}.`,
      },
      entropy: {
        of: (before, after) => after - before,
        colour: (gain) => diverging(0.5 - gain / (2 * even)),
        text: (gain) => minus(gain.toFixed(1)),
        marks: [`+${even.toFixed(1)}`, "0", `\u2212${even.toFixed(1)}`],
        tell: (all) =>
          `the median rises by ${minus(median(all).toFixed(2))} nats, of ` +
          `${even.toFixed(2)} where attention is spread evenly.`,
      },
    };
    const state = { name: names[0], key: "largest" };
    const valuesOf = (name) => {
      const [before, after] = found[name][state.key];
      const change = (v, i, j) =>
        v === null || after[i][j] === null ? null : views[state.key].of(v, after[i][j]);
      return before.map((layer, i) => layer.map((v, j) => change(v, i, j)));
    };
    const summary = html("p", { class: "summary" });
    const spec = () => {
      const { colour, text, marks, tell } = views[state.key];
      const [before, after] = found[state.name][state.key];
      const values = valuesOf(state.name);
      const told = tell(values.flat().filter((v) => v !== null));
      const called = looked(state.name, found[state.name]);
      summary.textContent = `${called.label}: ${told}`;
      return {
        title: `Sharpness by head, ${called.label}`,
        ...byHead(values),
        colour,
        text: (value) => (value === null ? "\u2013" : text(value)),
        tip: (row, column) => [
          `layer ${row + 1}, head ${column + 1}`,
          [
            [first, before],
            [last, after],
          ].map(([n, grid]) => ({
            ...called,
            label: `n = ${show(n)}`,
            value: show(grid[row][column], 3),
          })),
        ],
        legend: [gradientOf(diverging), marks.map((mark, i) => [i / 2, mark])],
      };
    };
    const small = (name) => [
      thumbnail(valuesOf(name), views[state.key].colour),
      looked(name, found[name]).label,
      html("br"),
      html("b", {}, views[state.key].text(median(valuesOf(name)))),
    ];
    const tabs = thumbs(names, small, (i) => {
      state.name = names[i];
      heat.update(spec());
    });
    const what = switcher("", ["largest weight", "entropy"], 0, (i) => {
      state.key = Object.keys(views)[i];
      tabs.fillIn(names.indexOf(state.name));
      heat.update(spec());
    });
    const span = note(`from n = ${show(first)} to n = ${show(last)}`);
    box.append(html("div", { class: "controls" }, what, span), tabs.group, summary);
    const heat = new HeatMap(box, spec());
  },
};

function explorer() {
  const part = (name) => document.getElementById(name);
  const sliders = Object.fromEntries(
    ["n", "s", "b", "z"].map((name) => [name, part(`explorer-${name}`)]),
  );
  Object.assign(sliders.n, { max: SIZES.length - 1, value: SIZES.indexOf(1000) });
  const setting = () => ({
    n: SIZES[sliders.n.value],
    s: Number(sliders.s.value),
    b: Number(sliders.b.value),
    z: Number(sliders.z.value),
  });

  const curves = (xs, softmax, ssmax) => [
    { ...softmaxLook, x: xs, y: xs.map(softmax) },
    { ...ssmaxLook, x: xs, y: xs.map(ssmax) },
  ];
  const bounds = (xs, lower, upper) =>
    [
      ["lower", lower, "--"],
      ["upper", upper, ":"],
    ].map(([name, of, dash]) => ({
      name,
      label: `${name} bound`,
      colour: "var(--quiet)",
      dash,
      x: xs,
      y: xs.map(of),
    }));
  const series1 = ({ s, b, z }) => [
    ...curves(
      SIZES,
      (n) => output1(n, 1, z),
      (n) => output1(n, factorOf(n, s, b), z),
    ),
    ...(b === 0
      ? bounds(
          SIZES,
          (n) => bound(n, s, z + 2),
          (n) => bound(n, s, z + 2),
        )
      : []),
  ];
  // Of the entries before z_max the largest is 1 and the smallest 0; with n = 2 there is only 0.
  const second = (n) => (n === 2 ? 0 : 1);
  const series3 = ({ n, s, b }) => [
    ...curves(
      TOPS,
      (z) => output3(n, 1, z),
      (z) => output3(n, factorOf(n, s, b), z),
    ),
    ...(b === 0
      ? bounds(
          TOPS.filter((z) => z >= second(n)),
          (z) => bound(n, s, z - second(n)),
          (z) => bound(n, s, z),
        )
      : []),
  ];
  const dots = (of, { n, s, b, z }) => [
    { y: of(n, 1, z), colour: softmaxLook.colour },
    { y: of(n, factorOf(n, s, b), z), colour: ssmaxLook.colour },
  ];
  const marks3 = (now) => [{ x: now.z, dots: dots(output3, now) }, ...gapMark(now)];
  const gapMark = ({ s }) =>
    s > 0 ? [{ x: 1 + 1 / s, label: `1 + 1/s = ${show(1 + 1 / s, 3)}` }] : [];

  const chart1 = new Chart(part("explorer-plot"), {
    title: "Input of figure 1",
    x: { label: "n", kind: "log" },
    y: outputAxis(),
    series: series1(setting()),
  });
  const chart3 = new Chart(part("explorer3-plot"), {
    title: "Input of figure 3",
    x: { label: "z_max", kind: "linear" },
    y: outputAxis(),
    series: series3(setting()),
  });

  const move = () => {
    const now = setting();
    const { n, s, b, z } = now;
    const factor = factorOf(n, s, b);
    for (const [name, value] of Object.entries(now)) {
      part(`explorer-${name}-value`).textContent = show(value);
      sliders[name].setAttribute("aria-valuetext", show(value));
    }
    part("explorer-softmax").textContent = output1(n, 1, z).toFixed(4);
    part("explorer-ssmax").textContent = output1(n, factor, z).toFixed(4);
    part("explorer3-softmax").textContent = output3(n, 1, z).toFixed(4);
    part("explorer3-ssmax").textContent = output3(n, factor, z).toFixed(4);
    chart1.update({
      series: series1(now),
      marks: [{ x: n, label: `n = ${show(n)}`, dots: dots(output1, now) }],
    });
    chart3.update({ series: series3(now), marks: marks3(now) });
    writeNotes(now, factor);
  };
  const writeNotes = ({ s, b }, factor) => {
    const hidden = "The paper's bounds hold for b = 0 and are hidden.";
    const onCurve =
      "The paper's bounds: all entries but one are equal here, so both lie on the curve.";
    const apart = "The paper's bounds are drawn where z_max is the largest entry.";
    const beyond = 1 + 1 / s > 20 ? ", beyond this plot" : "";
    const gap = `The critical lead is 1/s = ${show(1 / s, 3)} for any n${beyond}.`;
    const lead = s > 0 ? gap : "At s = 0 no lead is enough.";
    const turned = `Here s log n + b = ${show(factor, 3)} is negative: z_max gets the least.`;
    const last = factor < 0 ? ` ${turned}` : "";
    part("explorer-note").replaceChildren(...worded((b ? hidden : onCurve) + last));
    part("explorer3-note").replaceChildren(...worded(`${lead} ${b ? hidden : apart}${last}`));
  };
  for (const slider of Object.values(sliders)) slider.addEventListener("input", move);
  move();
}

const root = document.documentElement;

function theme() {
  const button = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const now = () => root.dataset.theme || (dark.matches ? "dark" : "light");
  const name = () => {
    button.textContent = now() === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `${button.textContent} colours`);
  };
  button.addEventListener("click", () => {
    root.dataset.theme = now() === "dark" ? "light" : "dark";
    name();
  });
  dark.addEventListener("change", name);
  name();
}

function claims() {
  const button = document.getElementById("open-claims");
  const all = [...document.querySelectorAll(".claim")];
  button.addEventListener("click", () => {
    const open = !all.every((claim) => claim.open);
    for (const claim of all) claim.open = open;
    button.textContent = open ? "Close all" : "Open all";
  });
}

// What only JavaScript makes useful shows itself, and has a width to be drawn at.
root.dataset.js = "";
for (const box of document.querySelectorAll("[data-plot]")) PLOTS[box.dataset.plot](box);
explorer();
if (document.getElementById("theme")) theme();
if (document.getElementById("open-claims")) claims();
