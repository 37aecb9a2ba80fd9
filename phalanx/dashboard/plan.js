"use strict";
const plan = JSON.parse(document.getElementById("plan").textContent);
const $ = id => document.getElementById(id);
const reasons = [...document.querySelectorAll("#why-not tr")];
let chosen = 0, sorting = { column: null, up: true }, words = [], fitting = false;
const shown = new Set(plan.candidates.map((candidate, k) => k).filter(k => plan.candidates[k].shown));

function element(name, attributes, parent, text) {
  const node = name.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4)) : document.createElement(name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}
function hint(node, text) {
  node.addEventListener("pointermove", event => {
    const tip = $("tip");
    tip.textContent = text; tip.style.display = "block";
    tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = (event.clientY + 20 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 16) + "px";
  });
  node.addEventListener("pointerleave", () => { $("tip").style.display = "none"; });
}
function chooseOnClick(node, k) { node.addEventListener("click", () => choose(k)); }
function emptied(id) { const node = $(id); node.replaceChildren(); return node; }
// About `count` round numbers from low to high.
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough)), step = power * ([1, 2, 2.5, 5].find(factor => factor * power >= rough) || 10), values = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-9); k++) values.push(+(k * step).toPrecision(12));
  return values;
}
function shortNumber(value) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) if (value >= size) return +(value / size).toPrecision(3) + letter;
  return String(+value.toPrecision(3));
}
function legend(parent, entries) {
  const node = element("div", { class: "legend" }, parent);
  for (const [text, style] of entries) { const entry = element("span", {}, node); element("i", { style }, entry); entry.append(text); }
}

// Stacked bars of all candidates that are shown, each below its name. The name of the chosen candidate is bold.
function bars(id, key, limit) {
  const parent = emptied(id), rows = [...shown].sort((a, b) => a - b), width = parent.clientWidth || 560, unit = plan.units[key], right = 74, tall = 44;
  const longest = Math.max(...rows.map(k => Math.max(plan.candidates[k][key].end, plan.candidates[k][key].high || 0)), 0) || 1;
  const near = limit && limit < 8 * longest, most = 1.04 * Math.max(near ? limit : 0, longest), bottom = tall * rows.length + 8;
  const svg = element("svg:svg", { viewBox: `0 0 ${width} ${bottom + (limit ? 34 : 20)}` }, parent), x = value => (width - right) * value / most, seen = new Map();
  for (const tick of ticks(0, most / unit, 5)) {
    element("svg:line", { x1: x(tick * unit), x2: x(tick * unit), y1: 0, y2: bottom, class: "axis" }, svg);
    element("svg:text", { x: x(tick * unit), y: bottom + 14, "text-anchor": tick ? "middle" : "start", class: "faint" }, svg, shortNumber(tick));
  }
  rows.forEach((k, row) => {
    const candidate = plan.candidates[k], y = 20 + row * tall;
    let at = 0;
    const name = element("svg:text", { x: 0, y: y - 5, "font-weight": k === chosen ? 700 : 400, class: "pick" }, svg, candidate.name);
    if (7 * (candidate.name.length + candidate.role.length) < width - 90) element("svg:tspan", { dx: 8, "font-weight": 400, class: "faint" }, name, candidate.role);
    chooseOnClick(name, k); hint(name, `${candidate.name}\n${candidate.role}`);
    for (const part of candidate[key].parts) {
      if (part.value >= 1e-3 * most) seen.set(part.label, part.color);
      const bar = element("svg:rect", { x: x(at), y, width: Math.max(0, x(at + part.value) - x(at)), height: 16, fill: part.color, stroke: "var(--paper)", "stroke-width": part.value > .02 * most ? 1 : 0 }, svg);
      hint(bar, `${candidate.name}\n${part.label}: ${part.text} (${(100 * part.value / candidate[key].end).toFixed(1)}%)`);
      at += part.value;
    }
    if (candidate[key].low !== undefined) {
      const line = element("svg:line", { x1: x(candidate[key].low), x2: x(candidate[key].high), y1: y + 19, y2: y + 19, stroke: "currentColor", "stroke-width": 2 }, svg);
      hint(line, `${candidate.name}\nP10–P90: ${candidate[key].between}`);
    }
    element("svg:text", { x: width, y: y + 13, "text-anchor": "end", ...(key === "memory" && !candidate.fits ? { style: "fill: var(--limit)" } : {}) }, svg, candidate[key].text);
  });
  if (near) element("svg:line", { x1: x(limit), x2: x(limit), y1: 0, y2: bottom, stroke: "var(--limit)", "stroke-dasharray": "4 3", "stroke-width": 1.5 }, svg);
  if (limit) element("svg:text", { x: near ? Math.max(x(limit), 130) : width, y: bottom + 30, "text-anchor": "end", style: "fill: var(--limit)" }, svg, `the device has ${plan.capacity_text}`);
  legend(parent, [...seen].map(([name, color]) => [name, `background:${color}`]));
}

// Points of all candidates, with a line through those of the trade-off. Candidates far slower than the winner are omitted: they would squeeze the others.
function scatter(id, picture) {
  const parent = emptied(id), width = parent.clientWidth || 560, height = 320, left = 56, low = 40, above = 24, first = picture.points.find(point => point.candidate === 0);
  const points = picture.points.filter(point => point.line || point.candidate === chosen || !first || (point.y < 2 * first.y && (!picture.limit || point.x < 1.5 * Math.max(picture.limit, first.x))));
  if (!points.length) { element("p", { class: "muted" }, parent, "no data"); return; }
  const xs = points.map(point => point.x), ys = points.map(point => point.y), near = picture.limit && picture.limit < 8 * Math.max(...xs);
  const right = 1.06 * Math.max(...xs, near ? picture.limit : 0), top = 1.08 * Math.max(...ys), base = Math.min(...ys) > .5 * Math.max(...ys) ? .9 * Math.min(...ys) : 0;
  const svg = element("svg:svg", { viewBox: `0 0 ${width} ${height}` }, parent);
  const x = value => left + (width - left - 14) * value / right, y = value => height - low - (height - low - above) * (value - base) / (top - base);
  for (const tick of ticks(base, top, 5)) {
    element("svg:line", { x1: left, x2: width - 14, y1: y(tick), y2: y(tick), class: "axis" }, svg);
    element("svg:text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end", class: "faint" }, svg, picture.prefix + shortNumber(tick));
  }
  for (const tick of ticks(0, right, width < 500 ? 4 : 6)) element("svg:text", { x: x(tick), y: height - low + 16, "text-anchor": "middle", class: "faint" }, svg, shortNumber(tick));
  element("svg:text", { x: width - 14, y: height - 6, "text-anchor": "end" }, svg, picture.x);
  element("svg:text", { x: 0, y: 12 }, svg, picture.y);
  const line = points.filter(point => point.line).sort((a, b) => a.x - b.x);
  if (line.length > 1) element("svg:polyline", { points: line.map(point => `${x(point.x)},${y(point.y)}`).join(" "), fill: "none", stroke: "currentColor" }, svg);
  if (near) element("svg:line", { x1: x(picture.limit), x2: x(picture.limit), y1: above, y2: height - low, stroke: "var(--limit)", "stroke-dasharray": "4 3" }, svg);
  const rank = point => point.candidate === chosen ? 2 : point.candidate === 0 ? 1 : 0;  // drawing order
  for (const point of [...points].sort((a, b) => rank(a) - rank(b))) {
    const candidate = plan.candidates[point.candidate], own = point.candidate === chosen, won = point.candidate === 0;
    const hollow = point.precision && !own;
    const paint = { fill: candidate.fits && !hollow ? won ? "var(--best)" : own ? "var(--ink)" : "var(--muted)" : "var(--paper)", stroke: !candidate.fits ? "var(--limit)" : hollow ? "var(--muted)" : "var(--paper)", "stroke-width": candidate.fits && !hollow ? 1 : 2 };
    const dot = element("svg:circle", { cx: x(point.x), cy: y(point.y), r: won ? 8 : own ? 7 : 5, class: "pick", ...paint }, svg);
    hint(dot, `${point.text}\n${candidate.role}${candidate.fits ? "" : ", does not fit"}`);
    chooseOnClick(dot, point.candidate);
  }
  // Labels, above all dots. The line falls and bends up, so there is room above it on the right.
  for (const point of points.filter(point => point.label)) {
    const own = point.label === picture.own, side = own ? { x: x(point.x), y: y(point.y) + 22, "text-anchor": "middle" } : { x: Math.min(x(point.x) + 7, width - 6.8 * point.label.length), y: y(point.y) - 7 };
    element("svg:text", { ...side, class: "label" }, svg, point.label);
  }
  const entries = [[plan.candidates[0].role, "background:var(--best);border-radius:50%"], ["others", "background:var(--muted);border-radius:50%"]];
  for (const precision of new Set(points.map(point => point.precision).filter(text => text))) entries.push([`others${precision}`, "border:2px solid var(--muted);border-radius:50%"]);
  if (points.some(point => !plan.candidates[point.candidate].fits)) entries.push(["does not fit", "border:2px solid var(--limit);border-radius:50%"]);
  if (line.length > 1) entries.push([picture.line, "height:2px;width:1.4em;background:var(--ink);vertical-align:middle"]);
  if (near) entries.push([`the device has ${plan.capacity_text}`, "height:0;width:1.4em;border-top:2px dashed var(--limit);vertical-align:middle"]);
  legend(parent, entries);
  if (points.length < picture.points.length) element("p", { class: "legend" }, parent, `Not shown, because far slower or larger: ${picture.points.length - points.length}.`);
}

function table() {
  const head = emptied("head"), body = emptied("body");
  const order = plan.candidates.map((candidate, k) => k).filter(k => {
    const candidate = plan.candidates[k], text = [candidate.role, ...candidate.cells.map(cell => cell.text)].join(" ").toLowerCase();
    return (!fitting || candidate.fits) && words.every(word => text.includes(word));
  });
  element("th", {}, head, "bars");
  plan.columns.forEach((column, index) => {
    const cell = element("th", index ? { class: "number" } : {}, head), name = element("button", {}, cell, column.name);
    if (column.help) hint(name, column.help);
    if (sorting.column === index) cell.setAttribute("aria-sort", sorting.up ? "ascending" : "descending");
    name.addEventListener("click", () => { sorting = { column: index, up: sorting.column === index ? !sorting.up : true }; table(); });
  });
  if (sorting.column !== null) order.sort((a, b) => {
    const first = plan.candidates[a].cells[sorting.column].sort, second = plan.candidates[b].cells[sorting.column].sort;
    return (first < second ? -1 : first > second ? 1 : 0) * (sorting.up ? 1 : -1);
  });
  for (const k of order) {
    const candidate = plan.candidates[k], row = element("tr", { class: k === chosen ? "chosen" : "" }, body);
    const box = element("input", { type: "checkbox", title: "draw its bars" }, element("td", {}, row));
    box.checked = shown.has(k);
    box.addEventListener("click", event => { event.stopPropagation(); shown.has(k) ? shown.delete(k) : shown.add(k); draw(); });
    candidate.cells.forEach((cell, index) => {
      const node = element("td", index ? { class: "number" } : {}, row, cell.text);
      if (!index) element("small", candidate.fits ? {} : { class: "bad" }, node, candidate.role + (candidate.fits ? "" : ", does not fit"));
    });
    chooseOnClick(row, k);
  }
  $("count").textContent = `${order.length} of ${plan.candidates.length}`;
}
function details() {
  const candidate = plan.candidates[chosen], rows = emptied("promise");
  $("name").textContent = `${candidate.name} (${candidate.role}${candidate.fits ? "" : ", does not fit"})`;
  $("toml").textContent = candidate.toml;
  for (const [name, value, between] of candidate.promise) {
    const row = element("tr", {}, rows);
    element("td", { class: "muted" }, row, name); element("td", { class: "number" }, row, value); element("td", { class: "muted" }, row, between);
  }
  reasons.forEach((row, index) => { row.className = (plan.why_not[index] === null ? "" : "known ") + (plan.why_not[index] === chosen ? "chosen" : ""); });
}
function choose(k) { chosen = k; shown.add(k); draw(); }
function charts() { bars("memory", "memory", plan.capacity); bars("step", "step"); scatter("trade", plan.trade); scatter("cost", plan.cost); }
function draw() { details(); charts(); table(); }
$("copy").addEventListener("click", () => navigator.clipboard.writeText($("toml").textContent).then(() => { $("copy").textContent = "copied"; setTimeout(() => { $("copy").textContent = "copy for the run file"; }, 1500); }));
$("filter").addEventListener("input", () => { words = $("filter").value.toLowerCase().split(" ").filter(word => word); table(); });
$("fitting").addEventListener("change", () => { fitting = $("fitting").checked; table(); });
reasons.forEach((row, index) => { if (plan.why_not[index] !== null) chooseOnClick(row, plan.why_not[index]); });
addEventListener("resize", charts);
draw();
