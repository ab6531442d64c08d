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

function layoutOf(chart, place, id) {
  const { xaxis, yaxis, yaxis2, target, annotations = [], shapes = [], height = 340, ...rest } = chart.layout;
  const narrow = place.clientWidth < 520;
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
    ...rest, height: root.classList.contains("on-paper") && !longest ? 0.8 * height : height, width: place.clientWidth,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("--ink") },
    margin: { l: 40, r: longest ? 18 + 6.4 * longest : 14, t: 10, b: 44 },
    hovermode: "closest", hoverlabel: { bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--ink") } },
    showlegend: false,
    annotations: painted(kept.map(({ legendgroup, ...note }) => note)), shapes: painted(lines),
    xaxis: axis(xaxis), yaxis: axis(yaxis), ...(yaxis2 ? { yaxis2: axis(yaxis2) } : {}),
  };
}

function draw(figure) {
  const view = data.blocks[figure.dataset.block][figure.dataset.view || 0];
  const holder = figure.querySelector(".charts");
  const id = figure.closest(".comparison-section").id;
  while (holder.children.length > view.charts.length) Plotly.purge(holder.lastChild), holder.lastChild.remove();
  while (holder.children.length < view.charts.length) {
    const place = holder.appendChild(document.createElement("div"));
    place.className = "chart";
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", figure.querySelector("h2").textContent);
  }
  figure.querySelector(".legend").replaceChildren(...view.legend.map(([text, name]) => {
    const key = document.createElement("span");
    key.textContent = text;
    key.style.setProperty("--own", `var(${name})`);
    return key;
  }));
  view.charts.forEach((chart, n) => {
    const place = holder.children[n];
    const traces = chart.data.filter((trace) => !hidden.has(trace.legendgroup));
    const options = { displayModeBar: false }; // drag to zoom, double-click to reset
    const bars = traces.map((trace) => (trace.colorbar
      ? { ...trace, colorbar: { thickness: 10, outlinewidth: 0, tickfont: { color: "--muted", size: 11 }, ...trace.colorbar } }
      : trace));
    Plotly.react(place, painted(bars), layoutOf(chart, place, id), options);
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
  const spread = new Set(values).size > 1 ? ` ± ${deviation(values).toFixed(places)}` : "";
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
    figure.dataset.view = event.target.value;
    draw(figure);
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
