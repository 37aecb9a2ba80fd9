"""The look of a plan's page and the program inside it, as the texts that `dashboard/plan_page` puts into the file. Nothing is loaded
from anywhere: the page works from a mail attachment."""

from __future__ import annotations

STYLE = """
:root { --ink: #1f2933; --muted: #7b8794; --grid: #e4e7eb; --best: #2563eb; --limit: #dc2626; --paper: #fff; --shade: #f5f7fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --muted: #9aa5b1; --grid: #3e4c59; --best: #60a5fa; --limit: #f87171; --paper: #1f2933; --shade: #27323f; } }
body { font: 14px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1180px; margin: 2em auto; padding: 0 1.5em; }
h1 { font-size: 1.35em; margin: 0; } h2 { font-size: 1em; margin: 1.6em 0 .4em; } p { margin: .2em 0; } .muted { color: var(--muted); }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 1.5em; } @media (max-width: 800px) { .two { grid-template-columns: 1fr; } }
pre { background: var(--shade); padding: .8em 1em; border-radius: 6px; overflow: auto; margin: 0; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .2em .6em; border-bottom: 1px solid var(--grid); }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
#candidates th { cursor: pointer; user-select: none; white-space: nowrap; } #candidates th[aria-sort=ascending]::after { content: " \\25b2"; }
#candidates th[aria-sort=descending]::after { content: " \\25bc"; } #candidates tbody tr { cursor: pointer; }
#candidates tr.chosen { background: var(--shade); box-shadow: inset 3px 0 var(--best); } #candidates tr.hidden { opacity: .45; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--ink); font-size: 11px; } svg .axis { stroke: var(--grid); }
#tip { position: fixed; pointer-events: none; background: var(--ink); color: var(--paper); padding: .3em .6em; border-radius: 4px;
  font-size: 12px; white-space: pre; display: none; z-index: 9; }
.legend span { display: inline-block; margin-right: 1em; } .legend i { display: inline-block; width: .8em; height: .8em; margin-right: .3em; border-radius: 2px; }
button { font: inherit; color: inherit; background: var(--shade); border: 1px solid var(--grid); border-radius: 4px; padding: .1em .7em; cursor: pointer; }
"""

SCRIPT = """
"use strict";
const plan = JSON.parse(document.getElementById("plan").textContent);
const $ = id => document.getElementById(id);
let chosen = 0, sorted = { column: null, up: true };
const shown = new Set(plan.options.map((option, k) => k).filter(k => plan.options[k].shown));

function element(name, attributes, parent, text) {
  const made = name.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4)) : document.createElement(name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}
function hint(made, text) {
  made.addEventListener("mousemove", event => {
    const tip = $("tip");
    tip.textContent = text; tip.style.display = "block";
    tip.style.left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8) + "px"; tip.style.top = event.clientY + 14 + "px";
  });
  made.addEventListener("mouseleave", () => { $("tip").style.display = "none"; });
}
function empty(id) { const place = $(id); place.replaceChildren(); return place; }

// Bars of several parts, one after the other: of all options that are shown, the chosen one in bold letters.
function bars(id, key, limit) {
  const place = empty(id), rows = [...shown].sort((a, b) => a - b), left = 190, width = 560, tall = 26;
  const most = 1.06 * Math.max(limit || 0, ...rows.map(k => plan.options[k][key].end));
  const svg = element("svg:svg", { viewBox: `0 0 ${width} ${tall * rows.length + 26}` }, place), x = value => left + (width - left - 62) * value / most;
  const seen = new Map();
  rows.forEach((k, row) => {
    const option = plan.options[k], y = 6 + row * tall;
    let at = 0;
    const name = element("svg:text", { x: left - 8, y: y + 14, "text-anchor": "end", "font-weight": k === chosen ? 700 : 400, style: "cursor:pointer" }, svg, option.name);
    name.addEventListener("click", () => choose(k));
    for (const part of option[key].parts) {
      seen.set(part.words, part.colour);
      const bar = element("svg:rect", { x: x(at), y, width: Math.max(0, x(at + part.value) - x(at)), height: 18, fill: part.colour }, svg);
      hint(bar, `${option.name}\\n${part.words}: ${part.text} (${(100 * part.value / option[key].end).toFixed(1)}%)`);
      at += part.value;
    }
    if (option[key].low !== undefined) {
      const line = element("svg:line", { x1: x(option[key].low), x2: x(option[key].high), y1: y + 20.5, y2: y + 20.5, stroke: "currentColor", "stroke-width": 2 }, svg);
      hint(line, `${option.name}\\nP10 - P90: ${option[key].between}`);
    }
    element("svg:text", { x: x(Math.max(at, option[key].high || 0)) + 5, y: y + 14 }, svg, option[key].text);
  });
  if (limit) {
    const line = element("svg:line", { x1: x(limit), x2: x(limit), y1: 0, y2: tall * rows.length + 6, stroke: "var(--limit)", "stroke-dasharray": "4 3", "stroke-width": 1.5 }, svg);
    hint(line, `the device: ${plan.capacity_text}`);
    element("svg:text", { x: x(limit), y: tall * rows.length + 20, "text-anchor": "end", style: "fill: var(--limit)" }, svg, plan.capacity_text);
  }
  const legend = element("div", { class: "legend" }, place);
  for (const [words, colour] of seen) { const one = element("span", {}, legend); element("i", { style: `background:${colour}` }, one); one.append(words); }
}

// Points of all options, with a line through those of the trade-off.
function scatter(id, picture) {
  const place = empty(id), width = 560, height = 300, left = 58, low = 34, points = picture.points;
  if (!points.length) { element("p", { class: "muted" }, place, "nothing is known of it"); return; }
  const most = axis => 1.12 * Math.max(...points.map(point => point[axis]), axis === "x" ? picture.limit || 0 : 0);
  const right = most("x"), top = most("y"), svg = element("svg:svg", { viewBox: `0 0 ${width} ${height}` }, place);
  const x = value => left + (width - left - 12) * value / right, y = value => height - low - (height - low - 12) * value / top;
  for (let k = 0; k <= 4; k++) {
    element("svg:line", { x1: left, x2: width - 12, y1: y(top * k / 4), y2: y(top * k / 4), class: "axis" }, svg);
    element("svg:text", { x: left - 6, y: y(top * k / 4) + 4, "text-anchor": "end" }, svg, picture.prefix + brief(top * k / 4));
    element("svg:text", { x: x(right * k / 4), y: height - low + 15, "text-anchor": "middle" }, svg, brief(right * k / 4));
  }
  element("svg:text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle" }, svg, picture.x);
  element("svg:text", { x: 4, y: 10 }, svg, picture.y);
  const line = points.filter(point => point.line).sort((a, b) => a.x - b.x);
  if (line.length > 1) element("svg:polyline", { points: line.map(point => `${x(point.x)},${y(point.y)}`).join(" "), fill: "none", stroke: "currentColor" }, svg);
  if (picture.limit) element("svg:line", { x1: x(picture.limit), x2: x(picture.limit), y1: 12, y2: height - low, stroke: "var(--limit)", "stroke-dasharray": "4 3" }, svg);
  for (const point of points) {
    const own = point.option === chosen, dot = element("svg:circle", { cx: x(point.x), cy: y(point.y), r: own ? 7 : 4.5, fill: own ? "var(--best)" : "var(--muted)", style: "cursor:pointer" }, svg);
    hint(dot, point.text);
    if (point.option !== null) dot.addEventListener("click", () => choose(point.option));
  }
}
function brief(value) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) if (value >= size) return +(value / size).toPrecision(3) + letter;
  return String(+value.toPrecision(3));
}

function table() {
  const head = empty("head"), body = empty("body"), order = plan.options.map((option, k) => k);
  element("th", {}, head, "");
  plan.columns.forEach((column, place) => {
    const cell = element("th", place ? { class: "number" } : {}, head, column);
    if (sorted.column === place) cell.setAttribute("aria-sort", sorted.up ? "ascending" : "descending");
    cell.addEventListener("click", () => { sorted = { column: place, up: sorted.column === place ? !sorted.up : true }; table(); });
  });
  if (sorted.column !== null) order.sort((a, b) => {
    const one = plan.options[a].cells[sorted.column].sort, other = plan.options[b].cells[sorted.column].sort;
    return (one < other ? -1 : one > other ? 1 : 0) * (sorted.up ? 1 : -1);
  });
  for (const k of order) {
    const row = element("tr", { class: (k === chosen ? "chosen " : "") + (shown.has(k) ? "" : "hidden") }, body);
    const box = element("input", { type: "checkbox", title: "show it in the bars" }, element("td", {}, row));
    box.checked = shown.has(k);
    box.addEventListener("click", event => { event.stopPropagation(); shown.has(k) ? shown.delete(k) : shown.add(k); draw(); });
    plan.options[k].cells.forEach((cell, place) => element("td", place ? { class: "number" } : {}, row, cell.text));
    row.addEventListener("click", () => choose(k));
  }
}
function details() {
  const option = plan.options[chosen], rows = empty("promise");
  $("name").textContent = `${option.name} (${option.role})`;
  $("toml").textContent = option.toml;
  for (const [name, value, between] of option.promise) {
    const row = element("tr", {}, rows);
    element("td", { class: "muted" }, row, name); element("td", { class: "number" }, row, value); element("td", { class: "muted" }, row, between);
  }
}
function choose(k) { chosen = k; shown.add(k); draw(); }
function draw() { details(); bars("memory", "memory", plan.capacity); bars("step", "step"); scatter("trade", plan.trade); scatter("cost", plan.cost); table(); }
$("copy").addEventListener("click", () => navigator.clipboard.writeText($("toml").textContent));
draw();
"""
