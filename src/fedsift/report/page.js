"use strict";
// Draw the report's charts in the page's colors, and let the reader choose views, methods and a target.

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const figures = [...document.querySelectorAll("[data-block]")];
const hidden = new Set(); // methods that the reader has hidden
const targets = Object.fromEntries(Object.entries(data.comparisons).map(([id, comparison]) => [id, comparison.target]));

// Colors

function color(name) {
  const [variable, opacity] = name.split("/");
  const value = getComputedStyle(root).getPropertyValue(variable).trim();
  if (!opacity) return value;
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(value.slice(at, at + 2), 16));
  return `rgba(${r}, ${g}, ${b}, ${opacity})`;
}

function painted(x) {
  if (Array.isArray(x)) return x.map(painted);
  if (x === "sequential") return [0, 1, 2, 3, 4].map((n) => [n / 4, color(`--h${n}`)]);
  if (typeof x === "string") return /^--\w+(\/[\d.]+)?$/.test(x) ? color(x) : x;
  if (x === null || typeof x !== "object") return x;
  return Object.fromEntries(Object.entries(x).map(([key, value]) => [key, painted(value)]));
}

// Charts

function axis(own) {
  const { title, ...rest } = own;
  return {
    gridcolor: color("--grid"), linecolor: color("--line"), zeroline: false, showline: false, automargin: true, tickcolor: "rgba(0,0,0,0)",
    tickfont: { color: color("--muted"), size: 11 }, exponentformat: "power", ...painted(rest),
    title: { text: title, font: { color: color("--soft"), size: 12 }, standoff: 8 },
  };
}

function layoutOf(chart, width, id) {
  const { xaxis, yaxis, yaxis2, target, annotations = [], shapes = [], height = 340, ...rest } = chart.layout;
  const narrow = width < 520;
  const kept = annotations.filter((note) => !(note.name === "end" && narrow) && !hidden.has(note.legendgroup));
  const longest = Math.max(0, ...kept.filter((note) => note.name === "end").map((note) => note.text.length));
  const lines = [...shapes];
  if (target && targets[id]) {
    const y = targets[id];
    lines.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: "--muted", width: 1, dash: "dot" } });
    kept.push({
      xref: "paper", x: 1, y, text: `target ${percent(y)}`, showarrow: false, xanchor: "right", yanchor: "top",
      font: { color: "--muted", size: 11 },
    });
  }
  return {
    ...rest, height: root.classList.contains("on-paper") && !longest ? 0.8 * height : height, width,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("--ink") },
    margin: { l: 40, r: longest ? 18 + 6.4 * longest : 14, t: 10, b: 44 },
    hovermode: "closest", hoverlabel: { bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--ink") } },
    showlegend: false,
    annotations: painted(kept.map(({ legendgroup, ...note }) => note)), shapes: painted(lines),
    xaxis: axis(xaxis), yaxis: axis(yaxis), ...(yaxis2 ? { yaxis2: axis(yaxis2) } : {}),
  };
}

function tracesOf(chart) {
  const scale = { thickness: 10, outlinewidth: 0, tickfont: { color: "--muted", size: 11 } };
  const shown = chart.data.filter((trace) => !hidden.has(trace.legendgroup));
  return painted(shown.map((trace) => (trace.colorbar ? { ...trace, colorbar: { ...scale, ...trace.colorbar } } : trace)));
}

const viewOf = (figure) => data.blocks[figure.dataset.block][figure.dataset.view || 0];

function draw(figure) {
  const view = viewOf(figure);
  const holder = figure.querySelector(".charts");
  const id = figure.closest(".comparison-section").id;
  while (holder.children.length > view.charts.length) Plotly.purge(holder.lastChild), holder.lastChild.remove();
  while (holder.children.length < view.charts.length) {
    const place = holder.appendChild(document.createElement("div"));
    place.className = "chart";
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", figure.querySelector("h2").textContent);
  }
  figure.querySelector(".legend").replaceChildren(...view.legend.map(([text, name, pattern = ""]) => {
    const key = document.createElement("span");
    key.textContent = text;
    key.dataset.pattern = pattern;
    key.style.setProperty("--own", `var(${name})`);
    return key;
  }));
  const options = { displayModeBar: false }; // drag to zoom, double-click to reset
  view.charts.forEach((chart, n) => {
    const place = holder.children[n];
    Plotly.react(place, tracesOf(chart), layoutOf(chart, place.clientWidth, id), options);
  });
}

const drawAll = () => figures.forEach(draw);

// The table at another target

const decimals = (x) => (Math.abs(x) >= 0.05 || x === 0 ? 2 : 4);
const times = (x) => `${x.toFixed(x >= 100 ? 0 : 1)}×`;
const percent = (x) => `${Number((100 * x).toFixed(2))} %`;
const mean = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;
const deviation = (values) => Math.sqrt(values.reduce((sum, x) => sum + (x - mean(values)) ** 2, 0) / (values.length - 1));

function formatted(values, missing) {
  if (!values.length || values.includes(null)) return { text: missing, sort: 1e300 };
  const places = decimals(mean(values));
  const width = new Set(values).size > 1 ? deviation(values).toFixed(places) : "";
  const spread = Number(width) ? ` ± ${width}` : "";
  return { text: mean(values).toFixed(places), spread, sort: mean(values) };
}

function toTarget(group, target) {
  const at = group.runs.map((run) => run.accuracy.findIndex((x, n) => run.rounds[n] && x !== null && x >= target));
  const of = (value) => group.runs.map((run, n) => (at[n] < 0 ? null : value(run, at[n])));
  const megabytes = formatted(of((run, n) => run.megabytes[n]), "∞");
  const ratios = of((run, n) => (run.dense && run.megabytes[n] ? (run.dense * run.rounds[n]) / run.megabytes[n] : null));
  const dense = ratios.includes(null) ? { text: "", sort: 1e300 } : { text: times(mean(ratios)), sort: mean(ratios) };
  const mibit = formatted(of((run, n) => run.mibit[n]), "–");
  const rounds = formatted(of((run, n) => run.rounds[n]), "–");
  if (!rounds.spread) rounds.text = rounds.text.replace(/\.00$/, "");
  const found = at.filter((n) => n >= 0).length;
  if (found && found < at.length) megabytes.note = `${found} of ${at.length} seeds reach it`;
  return [megabytes, dense, rounds, mibit, { text: "", sort: 1e300 }];
}

function fillIn(section) {
  const table = section.querySelector(".comparison");
  const found = new Map(data.comparisons[section.id].groups.map((group) => [group.name, toTarget(group, targets[section.id])]));
  const best = Math.min(...[...found.values()].map((cells) => cells[3].sort));
  for (const row of table.tBodies[0].rows) {
    const cells = found.get(row.dataset.group);
    if (cells[3].sort < 1e300) cells[4] = { text: `${(cells[3].sort / best).toFixed(2)}×`, sort: cells[3].sort / best };
    const places = row.querySelectorAll(".to-target");
    cells.forEach(({ text, spread, sort, note }, n) => {
      const cell = places[n];
      cell.textContent = text;
      cell.dataset.sort = sort;
      if (spread) cell.appendChild(document.createElement("i")).textContent = spread;
      if (note) cell.appendChild(document.createElement("small")).textContent = note;
    });
  }
}

// Controls

for (const input of document.querySelectorAll("input.target")) {
  input.addEventListener("input", () => {
    const section = input.closest(".comparison-section"), value = Number(input.value) / 100;
    if (!(value > 0 && value <= 1)) return;
    targets[section.id] = value;
    fillIn(section);
    section.querySelectorAll("[data-block]").forEach(draw);
  });
}

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach((each) => each.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();
    const compared = (a, b) => (isNaN(a) || isNaN(b) ? String(a).localeCompare(b) : a - b);
    const rows = [...table.tBodies[0].rows].sort((a, b) => (up ? 1 : -1) * compared(value(a), value(b)));
    table.tBodies[0].append(...rows);
  }));
}

for (const button of document.querySelectorAll(".toggle")) {
  button.addEventListener("click", () => {
    const row = button.closest("tr"), shown = hidden.has(row.dataset.group);
    shown ? hidden.delete(row.dataset.group) : hidden.add(row.dataset.group);
    button.setAttribute("aria-pressed", String(shown));
    row.classList.toggle("hidden", !shown);
    drawAll();
  });
}

for (const choice of document.querySelectorAll(".views")) {
  choice.addEventListener(choice.tagName === "SELECT" ? "change" : "click", (event) => {
    if (event.target.value === undefined || event.target === choice && choice.tagName !== "SELECT") return;
    choice.querySelectorAll("button").forEach((button) => button.setAttribute("aria-pressed", String(button === event.target)));
    const figure = choice.closest("[data-block]");
    choice.dataset.view = event.target.value * choice.dataset.step;
    figure.dataset.view = [...figure.querySelectorAll(".views")].reduce((sum, each) => sum + Number(each.dataset.view || 0), 0);
    draw(figure);
  });
}

// Figures and tables as files, in light colors

function save(name, type, content) {
  const link = document.createElement("a");
  link.href = content instanceof Blob ? URL.createObjectURL(content) : `data:${type};charset=utf-8,${encodeURIComponent(content)}`;
  link.download = name;
  link.click();
}

async function svgOf(figure) {
  const view = viewOf(figure), id = figure.closest(".comparison-section").id, width = view.charts.length > 1 ? 480 : 720;
  const parts = [];
  let height = 0;
  for (const [n, chart] of view.charts.entries()) {
    const layout = layoutOf(chart, width, id), traces = tracesOf(chart);
    const names = traces.filter((trace) => trace.name && trace.showlegend !== false).length;
    Object.assign(layout, {
      height: layout.height + 20 + 22 * Math.ceil((140 * names) / width), showlegend: names > 1,
      annotations: layout.annotations.filter((note) => note.name !== "end"),
      legend: { orientation: "h", x: 0, y: -0.2, yanchor: "top", traceorder: traces.some((trace) => trace.legendgroup) ? "reversed" : "normal" }, margin: { ...layout.margin, r: 14 },
    });
    const picture = await Plotly.toImage({ data: traces, layout }, { format: "svg", width, height: layout.height });
    parts.push(decodeURIComponent(picture.slice(picture.indexOf(",") + 1)).replace("<svg ", `<svg x="${n * width}" y="52" `));
    height = Math.max(height, layout.height);
  }
  const text = (y, size, words) => {
    const line = document.createElementNS("http://www.w3.org/2000/svg", "text");
    Object.entries({ x: 14, y, "font-size": size, "font-family": "sans-serif", fill: color("--ink") }).forEach(([key, value]) => line.setAttribute(key, value));
    line.textContent = words.replace(/\p{C}/gu, ""); // XML has no control characters
    return new XMLSerializer().serializeToString(line);
  };
  const all = `width="${width * view.charts.length}" height="${height + 52}"`;
  return `<svg xmlns="http://www.w3.org/2000/svg" ${all}><rect ${all} fill="#fff"/>${
    text(22, 15, [figure.querySelector("h2").textContent, view.name].filter(Boolean).join(" · "))}${
    text(40, 11, data.comparisons[id].about)}${parts.join("")}</svg>`;
}

async function savePicture(figure, kind) {
  root.classList.add("on-paper");
  const svg = await svgOf(figure).finally(() => root.classList.remove("on-paper"));
  const name = `${viewOf(figure).file}.${kind}`;
  if (kind === "svg") return save(name, "image/svg+xml", svg);
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [2 * image.width, 2 * image.height];
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => save(name, "image/png", blob));
}

function textsOf(table) {
  return [...table.rows].map((row) => [...row.cells].map((cell) => {
    const copy = cell.cloneNode(true);
    copy.querySelectorAll("small").forEach((note) => note.remove());
    return copy.textContent.replace(/\s+/g, " ").trim();
  }));
}

function csvOf(table) {
  const number = (text) => (/^([\d.]+×|\d{1,3}(,\d{3})+)$/.test(text) ? text.replace(/[×,]/g, "") : { "∞": "inf", "–": "" }[text] ?? text);
  const rows = textsOf(table);
  const columns = rows[0].flatMap((heading, n) => {
    const parts = rows.slice(1).map((row) => row[n].split(" ± "));
    const means = [heading, ...parts.map(([text]) => number(text))];
    return parts.some((part) => part.length > 1) ? [means, [`${heading} ±`, ...parts.map((part) => part[1] ?? "")]] : [means];
  });
  const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  return rows.map((_, n) => `${columns.map((column) => quoted(column[n])).join(",")}\n`).join("");
}

const LATEX = {
  "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "±": "$\\pm$", "×": "$\\times$", "∞": "$\\infty$",
  "θ": "$\\theta$", "·": "$\\cdot$", "–": "--",
};

function latexOf(table) {
  const escaped = (text) => text.replace(/[\\{}$&#%_~^±×∞θ·–]/g, (sign) => LATEX[sign] ?? `\\${sign}`);
  const kinds = [...table.rows[0].cells].slice(1).map((cell) => (cell.className === "folder" ? "l" : "r")).join("");
  const [head, ...rows] = textsOf(table).map((row) => `${row.map(escaped).join(" & ")} \\\\`);
  return ["% \\usepackage{booktabs}", `\\begin{tabular}{l${kinds}}`, "\\toprule", head, "\\midrule", ...rows, "\\bottomrule", "\\end{tabular}", ""].join("\n");
}

for (const button of document.querySelectorAll(".save button")) {
  button.addEventListener("click", () => {
    const block = button.closest(".block"), table = block.querySelector("table"), kind = button.value;
    if (kind === "csv") save(`${table.dataset.file}.csv`, "text/csv", csvOf(table));
    else if (kind === "tex") save(`${table.dataset.file}.tex`, "application/x-tex", latexOf(table));
    else savePicture(block, kind);
  });
}

// Dark mode, printing and resizing

function onPaper(is) {
  root.classList.toggle("on-paper", is);
  drawAll();
}

addEventListener("beforeprint", () => onPaper(true));
addEventListener("afterprint", () => onPaper(false));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
let waiting = 0, width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  clearTimeout(waiting);
  waiting = setTimeout(drawAll, 100);
});
drawAll();
root.dataset.drawn = "yes";
