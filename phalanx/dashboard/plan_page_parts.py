"""The look of a plan's page and the program inside it, as the texts that `dashboard/plan_page` puts into the file. Nothing is loaded
from anywhere: the page works from a mail attachment."""

from __future__ import annotations

STYLE = """
:root { --ink: #1f2933; --muted: #5f6c7b; --grid: #e4e7eb; --best: #0b62c4; --limit: #c0341d; --paper: #fff; --shade: #f5f7fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --muted: #a3aebb; --grid: #3e4c59; --best: #6cb2ff; --limit: #ff8f7a; --paper: #18212b; --shade: #232e3a; } }
* { box-sizing: border-box; }
body { font: 14px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1240px; margin: 1.5em auto; padding: 0 1.2em; }
h1 { font-size: 1.4em; margin: 0; } h2 { font-size: 1.05em; margin: 1.7em 0 .4em; } p { margin: .25em 0; } .muted { color: var(--muted); }
.two { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 0 2em; align-items: start; }
@media (max-width: 800px) { .two { grid-template-columns: minmax(0, 1fr); } }
pre { background: var(--shade); padding: .8em 1em; border-radius: 6px; overflow: auto; margin: 0; font-size: 13px; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .25em .6em; border-bottom: 1px solid var(--grid); vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; } #candidates { font-size: 13px; } #candidates td { white-space: nowrap; }
#candidates th button { font: inherit; font-weight: 600; color: inherit; background: none; border: 0; padding: 0; cursor: pointer; white-space: nowrap; }
#candidates th[aria-sort=ascending] button::after { content: " \\25b2"; } #candidates th[aria-sort=descending] button::after { content: " \\25bc"; }
#candidates tbody tr, #why-not tr.known { cursor: pointer; } #candidates tbody tr:hover, #why-not tr.known:hover { background: var(--shade); }
#candidates tr.chosen, #why-not tr.chosen { background: var(--shade); box-shadow: inset 3px 0 var(--best); }
#candidates small { display: block; color: var(--muted); } .bad { color: var(--limit); }
#why-not td:first-child { white-space: nowrap; font-weight: 600; } #why-not td:last-child { font: 12px/1.6 ui-monospace, monospace; color: var(--muted); }
@media (max-width: 800px) { #why-not td { display: block; border: 0; padding: 0 .4em; } #why-not tr { display: block; padding: .4em 0; border-bottom: 1px solid var(--grid); } }
.tools input[type=search] { font: inherit; color: inherit; background: var(--shade); border: 1px solid var(--grid); border-radius: 4px; padding: .2em .6em; width: 17em; margin-right: 1em; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--ink); font-size: 12px; } svg .faint { fill: var(--muted); } svg .axis { stroke: var(--grid); }
svg .pick { cursor: pointer; } svg .label { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; pointer-events: none; }
#tip { position: fixed; pointer-events: none; background: var(--ink); color: var(--paper); padding: .35em .7em; border-radius: 4px;
  font-size: 12px; white-space: pre-line; max-width: 90vw; display: none; z-index: 9; }
.legend { font-size: 12px; color: var(--muted); } .legend span { display: inline-block; margin-right: 1.1em; } .legend i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border-radius: 2px; }
button { font: inherit; color: inherit; background: var(--shade); border: 1px solid var(--grid); border-radius: 4px; padding: .1em .7em; cursor: pointer; }
@media print { .tools, #copy, #candidates input { display: none; } body { max-width: none; margin: 0; } .scroll { overflow: visible; } #candidates td { white-space: normal; } }
"""

SCRIPT = """
"use strict";
const plan = JSON.parse(document.getElementById("plan").textContent);
const $ = id => document.getElementById(id);
const reasons = [...document.querySelectorAll("#why-not tr")];
let chosen = 0, sorted = { column: null, up: true }, words = [], fitting = false;
const shown = new Set(plan.options.map((option, k) => k).filter(k => plan.options[k].shown));

function element(name, attributes, parent, text) {
  const made = name.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4)) : document.createElement(name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}
function hint(made, text) {
  made.addEventListener("pointermove", event => {
    const tip = $("tip");
    tip.textContent = text; tip.style.display = "block";
    tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = (event.clientY + 20 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 16) + "px";
  });
  made.addEventListener("pointerleave", () => { $("tip").style.display = "none"; });
}
function picks(made, k) { made.addEventListener("click", () => choose(k)); }
function empty(id) { const place = $(id); place.replaceChildren(); return place; }
// Round numbers from low to high, about as many as are wanted.
function ticks(low, high, many) {
  const rough = (high - low) / many, power = 10 ** Math.floor(Math.log10(rough)), step = power * ([1, 2, 2.5, 5].find(one => one * power >= rough) || 10), found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-9); k++) found.push(+(k * step).toPrecision(12));
  return found;
}
function brief(value) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) if (value >= size) return +(value / size).toPrecision(3) + letter;
  return String(+value.toPrecision(3));
}
function legend(place, entries) {
  const made = element("div", { class: "legend" }, place);
  for (const [text, style] of entries) { const one = element("span", {}, made); element("i", { style }, one); one.append(text); }
}

// Bars of several parts, one after the other: of all options that are shown, each below its name, the chosen one's in bold letters.
function bars(id, key, limit) {
  const place = empty(id), rows = [...shown].sort((a, b) => a - b), width = place.clientWidth || 560, one = plan.units[key], right = 74, tall = 44;
  const longest = Math.max(...rows.map(k => Math.max(plan.options[k][key].end, plan.options[k][key].high || 0)), 0) || 1;
  const near = limit && limit < 8 * longest, most = 1.04 * Math.max(near ? limit : 0, longest), bottom = tall * rows.length + 8;
  const svg = element("svg:svg", { viewBox: `0 0 ${width} ${bottom + (limit ? 34 : 20)}` }, place), x = value => (width - right) * value / most, seen = new Map();
  for (const tick of ticks(0, most / one, 5)) {
    element("svg:line", { x1: x(tick * one), x2: x(tick * one), y1: 0, y2: bottom, class: "axis" }, svg);
    element("svg:text", { x: x(tick * one), y: bottom + 14, "text-anchor": tick ? "middle" : "start", class: "faint" }, svg, brief(tick));
  }
  rows.forEach((k, row) => {
    const option = plan.options[k], y = 20 + row * tall;
    let at = 0;
    const name = element("svg:text", { x: 0, y: y - 5, "font-weight": k === chosen ? 700 : 400, class: "pick" }, svg, option.name);
    if (7 * (option.name.length + option.role.length) < width - 90) element("svg:tspan", { dx: 8, "font-weight": 400, class: "faint" }, name, option.role);
    picks(name, k); hint(name, `${option.name}\\n${option.role}`);
    for (const part of option[key].parts) {
      if (part.value >= 1e-3 * most) seen.set(part.words, part.colour);
      const bar = element("svg:rect", { x: x(at), y, width: Math.max(0, x(at + part.value) - x(at)), height: 16, fill: part.colour, stroke: "var(--paper)", "stroke-width": part.value > .02 * most ? 1 : 0 }, svg);
      hint(bar, `${option.name}\\n${part.words}: ${part.text} (${(100 * part.value / option[key].end).toFixed(1)}%)`);
      at += part.value;
    }
    if (option[key].low !== undefined) {
      const line = element("svg:line", { x1: x(option[key].low), x2: x(option[key].high), y1: y + 19, y2: y + 19, stroke: "currentColor", "stroke-width": 2 }, svg);
      hint(line, `${option.name}\\nP10–P90: ${option[key].between}`);
    }
    element("svg:text", { x: width, y: y + 13, "text-anchor": "end", ...(key === "memory" && !option.fits ? { style: "fill: var(--limit)" } : {}) }, svg, option[key].text);
  });
  if (near) element("svg:line", { x1: x(limit), x2: x(limit), y1: 0, y2: bottom, stroke: "var(--limit)", "stroke-dasharray": "4 3", "stroke-width": 1.5 }, svg);
  if (limit) element("svg:text", { x: near ? Math.max(x(limit), 130) : width, y: bottom + 30, "text-anchor": "end", style: "fill: var(--limit)" }, svg, `the device has ${plan.capacity_text}`);
  legend(place, [...seen].map(([name, colour]) => [name, `background:${colour}`]));
}

// Points of all options, with a line through those of the trade-off. What is far slower than the winner would squeeze the rest together.
function scatter(id, picture) {
  const place = empty(id), width = place.clientWidth || 560, height = 320, left = 56, low = 40, above = 24, first = picture.points.find(point => point.option === 0);
  const points = picture.points.filter(point => point.line || point.option === chosen || !first || (point.y < 2 * first.y && (!picture.limit || point.x < 1.5 * Math.max(picture.limit, first.x))));
  if (!points.length) { element("p", { class: "muted" }, place, "nothing is known of it"); return; }
  const xs = points.map(point => point.x), ys = points.map(point => point.y), near = picture.limit && picture.limit < 8 * Math.max(...xs);
  const right = 1.06 * Math.max(...xs, near ? picture.limit : 0), top = 1.08 * Math.max(...ys), base = Math.min(...ys) > .5 * Math.max(...ys) ? .9 * Math.min(...ys) : 0;
  const svg = element("svg:svg", { viewBox: `0 0 ${width} ${height}` }, place);
  const x = value => left + (width - left - 14) * value / right, y = value => height - low - (height - low - above) * (value - base) / (top - base);
  for (const tick of ticks(base, top, 5)) {
    element("svg:line", { x1: left, x2: width - 14, y1: y(tick), y2: y(tick), class: "axis" }, svg);
    element("svg:text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end", class: "faint" }, svg, picture.prefix + brief(tick));
  }
  for (const tick of ticks(0, right, width < 500 ? 4 : 6)) element("svg:text", { x: x(tick), y: height - low + 16, "text-anchor": "middle", class: "faint" }, svg, brief(tick));
  element("svg:text", { x: width - 14, y: height - 6, "text-anchor": "end" }, svg, picture.x);
  element("svg:text", { x: 0, y: 12 }, svg, picture.y);
  const line = points.filter(point => point.line).sort((a, b) => a.x - b.x);
  if (line.length > 1) element("svg:polyline", { points: line.map(point => `${x(point.x)},${y(point.y)}`).join(" "), fill: "none", stroke: "currentColor" }, svg);
  if (near) element("svg:line", { x1: x(picture.limit), x2: x(picture.limit), y1: above, y2: height - low, stroke: "var(--limit)", "stroke-dasharray": "4 3" }, svg);
  const rank = point => point.option === chosen ? 2 : point.option === 0 ? 1 : 0;  // who lies above whom
  for (const point of [...points].sort((a, b) => rank(a) - rank(b))) {
    const option = plan.options[point.option], own = point.option === chosen, won = point.option === 0;
    const paint = { fill: option.fits ? won ? "var(--best)" : own ? "var(--ink)" : "var(--muted)" : "var(--paper)", stroke: option.fits ? "var(--paper)" : "var(--limit)", "stroke-width": option.fits ? 1 : 2 };
    const dot = element("svg:circle", { cx: x(point.x), cy: y(point.y), r: won ? 8 : own ? 7 : 5, class: "pick", ...paint }, svg);
    hint(dot, `${point.text}\\n${option.role}${option.fits ? "" : ", does not fit"}`);
    picks(dot, point.option);
  }
  // Above all dots. The line falls and bends up, with room above it on the right, but for what lies above the winner.
  for (const point of points.filter(point => point.label)) {
    const own = point.label === picture.own, side = own ? { x: x(point.x), y: y(point.y) + 22, "text-anchor": "middle" } : { x: Math.min(x(point.x) + 7, width - 6.8 * point.label.length), y: y(point.y) - 7 };
    element("svg:text", { ...side, class: "label" }, svg, point.label);
  }
  const entries = [[plan.options[0].role, "background:var(--best);border-radius:50%"], ["others", "background:var(--muted);border-radius:50%"]];
  if (points.some(point => !plan.options[point.option].fits)) entries.push(["does not fit", "border:2px solid var(--limit);border-radius:50%"]);
  if (line.length > 1) entries.push([picture.line, "height:2px;width:1.4em;background:var(--ink);vertical-align:middle"]);
  if (near) entries.push([`the device has ${plan.capacity_text}`, "height:0;width:1.4em;border-top:2px dashed var(--limit);vertical-align:middle"]);
  legend(place, entries);
  if (points.length < picture.points.length) element("p", { class: "legend" }, place, `Outside of the picture, as far slower or larger: ${picture.points.length - points.length}.`);
}

function table() {
  const head = empty("head"), body = empty("body");
  const order = plan.options.map((option, k) => k).filter(k => {
    const option = plan.options[k], text = [option.role, ...option.cells.map(cell => cell.text)].join(" ").toLowerCase();
    return (!fitting || option.fits) && words.every(word => text.includes(word));
  });
  element("th", {}, head, "bars");
  plan.columns.forEach((column, place) => {
    const cell = element("th", place ? { class: "number" } : {}, head), name = element("button", {}, cell, column.name);
    if (column.means) hint(name, column.means);
    if (sorted.column === place) cell.setAttribute("aria-sort", sorted.up ? "ascending" : "descending");
    name.addEventListener("click", () => { sorted = { column: place, up: sorted.column === place ? !sorted.up : true }; table(); });
  });
  if (sorted.column !== null) order.sort((a, b) => {
    const one = plan.options[a].cells[sorted.column].sort, other = plan.options[b].cells[sorted.column].sort;
    return (one < other ? -1 : one > other ? 1 : 0) * (sorted.up ? 1 : -1);
  });
  for (const k of order) {
    const option = plan.options[k], row = element("tr", { class: k === chosen ? "chosen" : "" }, body);
    const box = element("input", { type: "checkbox", title: "draw its bars" }, element("td", {}, row));
    box.checked = shown.has(k);
    box.addEventListener("click", event => { event.stopPropagation(); shown.has(k) ? shown.delete(k) : shown.add(k); draw(); });
    option.cells.forEach((cell, place) => {
      const made = element("td", place ? { class: "number" } : {}, row, cell.text);
      if (!place) element("small", option.fits ? {} : { class: "bad" }, made, option.role + (option.fits ? "" : ", does not fit"));
    });
    picks(row, k);
  }
  $("many").textContent = `${order.length} of ${plan.options.length}`;
}
function details() {
  const option = plan.options[chosen], rows = empty("promise");
  $("name").textContent = `${option.name} (${option.role}${option.fits ? "" : ", does not fit"})`;
  $("toml").textContent = option.toml;
  for (const [name, value, between] of option.promise) {
    const row = element("tr", {}, rows);
    element("td", { class: "muted" }, row, name); element("td", { class: "number" }, row, value); element("td", { class: "muted" }, row, between);
  }
  reasons.forEach((row, place) => { row.className = (plan.why_not[place] === null ? "" : "known ") + (plan.why_not[place] === chosen ? "chosen" : ""); });
}
function choose(k) { chosen = k; shown.add(k); draw(); }
function charts() { bars("memory", "memory", plan.capacity); bars("step", "step"); scatter("trade", plan.trade); scatter("cost", plan.cost); }
function draw() { details(); charts(); table(); }
$("copy").addEventListener("click", () => navigator.clipboard.writeText($("toml").textContent).then(() => { $("copy").textContent = "copied"; setTimeout(() => { $("copy").textContent = "copy for the run file"; }, 1500); }));
$("filter").addEventListener("input", () => { words = $("filter").value.toLowerCase().split(" ").filter(word => word); table(); });
$("fitting").addEventListener("change", () => { fitting = $("fitting").checked; table(); });
reasons.forEach((row, place) => { if (plan.why_not[place] !== null) picks(row, plan.why_not[place]); });
addEventListener("resize", charts);
draw();
"""
