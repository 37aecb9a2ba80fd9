// A line chart over steps or time: mean with the range of each bucket, marks, zoom by dragging, a readout, PNG and CSV.
import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import type { N } from "./api";
import { saveCanvas, saveCsv } from "./files";
import { type Formatter, moment, rate, size, whole } from "./format";
import type { Range } from "./route";
import { onTheme, theme, type Theme } from "./theme";

export interface Line { label: string; color?: string; values: N[]; low?: N[]; high?: N[]; dashed?: boolean; x?: number[]; }
export interface Mark { x: number; y?: N; label: string; kind: "point" | "tick" | "limit"; color: keyof Theme; id?: number; }
export interface ChartProps {
  title: string; x: number[]; lines: Line[]; format: Formatter; height?: number; marks?: Mark[]; faint?: { x: N[]; y: N[]; label: string };
  band?: { low: N; high: N; middle?: N; label: string }; isTime?: boolean; xLabel?: string; log?: boolean; onLog?: (log: boolean) => void;
  onZoom?: (low: number | null, high: number | null) => void; zoomed?: boolean; group?: string; onMark?: (id: number) => void; value?: string; hint?: string;
  /** Of the axis. It is drawn from the data that is there, until the server has answered with finer data. */
  range?: Range;
}

// Ticks of bytes are round in binary units.
const BINARY = Array.from({ length: 60 }, (_, power) => 2 ** power);
const two = (value: number) => String(value).padStart(2, "0");

// All ticks of an axis in the unit of the greatest, with as many decimals as tell them apart.
function bytes(value: number, greatest: number, step: number): string {
  const power = Math.min(5, Math.max(0, Math.floor(Math.log2(Math.max(1, greatest)) / 10))), unit = 1024 ** power;
  return `${(value / unit).toFixed(Math.min(4, Math.max(0, Math.ceil(-Math.log10(step / unit) - 0.02))))} ${power ? `${"KMGTP"[power - 1]}iB` : "B"}`;
}

function timeLabels(_: uPlot, splits: number[], __: number, ___: number, step: number): string[] {
  let day = "";
  return splits.map(split => {
    const at = new Date(split * 1000), date = at.toLocaleDateString("en-US", { month: "short", day: "numeric" }), hour = `${two(at.getHours())}:${two(at.getMinutes())}`;
    const time = step < 60 ? `${hour}:${two(at.getSeconds())}` : hour, isNew = date !== day;
    day = date;
    return step >= 86400 ? date : isNew && split !== splits[0] ? `${date} ${time}` : time;
  });
}

// As many digits as the server sends.
const digits = (value: N | undefined): N => (finite(value) ? (Number.isInteger(value) ? value : Number(value.toPrecision(7))) : null);
const finite = (value: N | undefined): value is number => typeof value === "number" && Number.isFinite(value);

// Lines of runs have an axis each; uPlot wants one for all.
function aligned(props: ChartProps): { x: number[]; columns: N[][] } {
  if (!props.lines.some(line => line.x)) return { x: props.x, columns: props.lines.flatMap(line => line.low && line.high ? [line.values, line.high, line.low] : [line.values]) };
  const x = [...new Set(props.lines.flatMap(line => line.x ?? props.x))].sort((a, b) => a - b);
  const at = new Map(x.map((value, index) => [value, index]));
  const spread = (from: number[], values: N[]) => { const out: N[] = new Array(x.length).fill(undefined); from.forEach((value, index) => { out[at.get(value)!] = values[index] ?? null; }); return out; };
  return { x, columns: props.lines.map(line => spread(line.x ?? props.x, line.values)) };
}

function xRange(props: ChartProps, least: number, greatest: number): [number, number] {
  const low = props.range?.[0] ?? least, high = props.range?.[1] ?? greatest;
  return low < high ? [low, high] : [least, greatest];
}

// Of what is in sight, with one point more at each end.
function yRange(props: ChartProps, left: number, right: number): [number, number] {
  let low = Infinity, high = -Infinity;
  const take = (value: N | undefined) => { if (finite(value) && (!props.log || value > 0)) { if (value < low) low = value; if (value > high) high = value; } };
  for (const line of props.lines) {
    const x = line.x ?? props.x;
    let begin = 0, end = x.length;
    while (begin + 1 < end && x[begin + 1]! < left) begin++;
    while (end - 1 > begin && x[end - 2]! > right) end--;
    for (const column of [line.values, line.low, line.high]) if (column) for (let index = begin; index < end; index++) take(column[index]);
  }
  for (const mark of props.marks ?? []) if (mark.x >= left && mark.x <= right) take(mark.y);
  if (props.band) for (const value of [props.band.low, props.band.high]) if (finite(value) && value < 4 * high) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low === Infinity) return [0, 1];
  if (props.log) return [low / 1.1, high * 1.1];
  const room = (high - low) * 0.07 || Math.abs(high) * 0.05 || 1;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

const LATER = 150;
let inUse: HTMLElement | null = null;

export function Chart(props: ChartProps) {
  const place = useRef<HTMLDivElement>(null), plot = useRef<uPlot | null>(null), latest = useRef(props), [readout, setReadout] = useState("");
  const [width, setWidth] = useState(0), [colors, setColors] = useState(0);
  latest.current = props;
  // A view makes its lists of lines and marks anew whenever it is rendered; what is drawn changes only with the numbers in them.
  const data = useMemo(() => aligned(props), [props.x, ...props.lines.flatMap(line => [line.values, line.high, line.x])]);
  const shape = props.lines.map(line => `${line.label}${line.low ? "~" : ""}${line.color}`).join("|");

  useEffect(() => onTheme(() => setColors(value => value + 1)), []);
  useEffect(() => {
    const observer = new ResizeObserver(entries => setWidth(Math.floor(entries[0]!.contentRect.width)));
    observer.observe(place.current!);
    return () => observer.disconnect();
  }, []);
  useLayoutEffect(() => {
    if (!width) return;
    const made = new uPlot(options(latest, width, text => setReadout(text)), [data.x, ...data.columns] as uPlot.AlignedData, place.current!);
    made.over.setAttribute("aria-hidden", "true");
    plot.current = made;
    return () => { made.destroy(); plot.current = null; };
  }, [width, shape, colors, props.log, props.isTime, props.height]);
  // A chart that nobody sees is drawn when it comes into sight.
  const isSeen = useRef(true), draw = useRef(() => {}), stale = useRef(() => {});
  draw.current = () => { plot.current?.setData([data.x, ...data.columns] as uPlot.AlignedData); };
  useEffect(() => {
    let isStale = false;
    const observer = new IntersectionObserver(entries => { isSeen.current = entries[entries.length - 1]!.isIntersecting; if (isSeen.current && isStale) { isStale = false; draw.current(); } }, { rootMargin: "100px" });
    observer.observe(place.current!);
    stale.current = () => { isStale = true; };
    return () => observer.disconnect();
  }, []);
  // Of a zoom, the chart in use shows the new range at once. The others wait for the data of the server, if that comes soon: two drawings of each would
  // make the first one late.
  const drawn = useRef(data);
  useLayoutEffect(() => {
    const isZoom = drawn.current === data;
    drawn.current = data;
    if (!isSeen.current) { stale.current(); return; }
    if (!isZoom || inUse === null || inUse === place.current) { draw.current(); return; }
    const timer = window.setTimeout(() => draw.current(), LATER);
    return () => clearTimeout(timer);
  }, [data, props.range?.[0], props.range?.[1], props.marks?.length, props.marks?.at(-1)?.x, props.marks?.at(-1)?.y, props.faint?.x, props.band?.low, props.band?.high]);

  function key(event: KeyboardEvent) {
    const made = plot.current;
    if (!made || !data.x.length) return;
    const [low, high] = xRange(props, data.x[0]!, data.x.at(-1)!), first = Math.max(0, data.x.findIndex(x => x >= low)), last = Math.max(first, data.x.filter(x => x <= high).length - 1);
    const now = made.cursor.idx ?? last, far = event.shiftKey ? Math.max(1, Math.round((last - first) / 20)) : 1;
    const next = event.key === "ArrowLeft" ? now - far : event.key === "ArrowRight" ? now + far : event.key === "Home" ? first : event.key === "End" ? last : null;
    if (next !== null) {
      const index = Math.min(last, Math.max(first, next)), value = data.columns[0]?.[index];
      made.setCursor({ left: made.valToPos(data.x[index]!, "x"), top: finite(value) ? made.valToPos(value, "y") : 10 });
      event.preventDefault();
    } else if ((event.key === "+" || event.key === "-") && props.onZoom) {
      inUse = place.current;
      const middle = data.x[Math.min(last, Math.max(first, now))]!, half = (high - low) / 4;
      event.key === "+" ? props.onZoom(Math.max(low, middle - half), Math.min(high, middle + half)) : props.onZoom(null, null);
      event.preventDefault();
    }
  }
  function csv() {
    const extra = props.marks?.length ? ["mark"] : [], marks = new Map((props.marks ?? []).map(mark => [mark.x, mark.label]));
    const columns = [props.xLabel ?? (props.isTime ? "time" : "step"), ...props.lines.flatMap(line => line.low && line.high ? [line.label, `${line.label} max`, `${line.label} min`] : [line.label]), ...extra];
    const rows = data.x.map((x, index) => [x, ...data.columns.map(column => digits(column[index])), ...(extra.length ? [marks.get(x) ?? null] : [])]);
    for (const mark of props.marks ?? []) if (!data.x.includes(mark.x)) rows.push([mark.x, mark.y ?? null, ...data.columns.slice(1).map(() => null), mark.label]);
    saveCsv(props.title, { columns, rows });
  }
  function png() { const made = plot.current; if (made) saveCanvas(props.title, made.ctx.canvas, made.width, made.height, made.ctx.canvas.width / made.width); }
  const last = [...(props.lines[0]?.values ?? [])].reverse().find(finite);
  return (
    <section class="card chart">
      <CardHead title={props.title} value={props.value ?? props.format(last)} onPng={png} onCsv={csv}>
        {props.onLog && <button type="button" aria-pressed={!!props.log} onClick={() => props.onLog!(!props.log)}>log</button>}
        {props.zoomed && props.onZoom && <button type="button" onClick={() => props.onZoom!(null, null)}>whole range</button>}
      </CardHead>
      <div class="plot" ref={place} tabIndex={0} role="group" aria-roledescription="chart" aria-label={`${props.title}, last value ${props.format(last)}; arrow keys read values`} onKeyDown={key} />
      <p class="readout" aria-live="polite">{readout || props.hint || " "}</p>
      {(props.lines.length > 1 || props.marks?.length || props.faint?.x.length || props.band) ? <Legend props={props} /> : null}
    </section>
  );
}

export function CardHead(props: { title: string; value?: string; onPng: () => void; onCsv: () => void; children?: ComponentChildren }) {
  return (
    <header class="card-head">
      <h2>{props.title}</h2>{props.value !== undefined && <span class="card-value">{props.value}</span>}
      <span class="tools">{props.children}
        <button type="button" onClick={props.onPng} aria-label={`PNG of ${props.title}`}>PNG</button>
        <button type="button" onClick={props.onCsv} aria-label={`CSV of ${props.title}`}>CSV</button>
      </span>
    </header>
  );
}

function Legend({ props }: { props: ChartProps }) {
  const colors = theme(), entries: [string, string, string][] = props.lines.length > 1 || props.marks?.length || props.faint?.x.length || props.band ? props.lines.map(line => [line.label, line.color ?? colors.best, "line"]) : [];
  if (props.lines.some(line => line.low)) entries.push(["least to greatest", colors.best, "area"]);
  if (props.faint?.x.length) entries.push([props.faint.label, colors.muted, "line"]);
  if (props.band) entries.push([props.band.label, colors.good, "area"]);
  for (const mark of props.marks ?? []) if (!entries.some(([label]) => label === kindLabel(mark))) entries.push([kindLabel(mark), colors[mark.color], mark.kind]);
  return <p class="legend">{entries.map(([label, color, kind]) => <span key={label}><i class={`key ${kind}`} style={{ background: color }} />{label}</span>)}</p>;
}

const kindLabel = (mark: Mark) => mark.label.split(":")[0]!;

function options(latest: { current: ChartProps }, width: number, say: (text: string) => void): uPlot.Options {
  const props = latest.current, colors = theme(), font = "12px system-ui, sans-serif", series: uPlot.Series[] = [{}], bands: uPlot.Band[] = [];
  for (const line of props.lines) {
    const color = line.color ?? colors.best, many = line.values.length > 60;
    series.push({ label: line.label, stroke: color, width: 1.6, spanGaps: !!line.x, points: { show: !many, size: 5, fill: color }, ...(line.dashed ? { dash: [6, 4] } : {}) });
    if (line.low && line.high) {
      const at = series.length;
      series.push({ stroke: "transparent", width: 0, points: { show: false } }, { stroke: "transparent", width: 0, points: { show: false } });
      bands.push({ series: [at, at + 1], fill: `${color}2e` });
    }
  }
  const axis = { stroke: colors.muted, font, ticks: { show: false }, grid: { stroke: colors.grid, width: 1 } };
  const title = props.isTime ? moment : whole, isBytes = props.format === size || props.format === rate;
  return {
    width, height: props.height ?? 240, series, bands, padding: [10, 28, 0, 0], legend: { show: false },
    scales: {
      x: { time: !!props.isTime, range: (_, least, greatest) => least === null ? [0, 1] : xRange(latest.current, least, greatest) },
      y: { distr: props.log ? 3 : 1, range: plot => yRange(latest.current, plot.scales.x?.min ?? -Infinity, plot.scales.x?.max ?? Infinity) },
    },
    axes: [
      { ...axis, space: 76, size: 30, ...(props.isTime ? { values: timeLabels } : { values: (_: uPlot, splits: number[]) => splits.map(value => Number.isInteger(value) ? value.toLocaleString("en-US") : value < 10 ? String(value) : "") }) },
      { ...axis, size: (_: uPlot, labels: string[] | null) => 16 + 6.9 * Math.max(4, ...(labels ?? []).map(label => label.length)), ...(isBytes ? { incrs: BINARY } : {}), values: (_: uPlot, splits: number[], __: number, ___: number, step: number) => splits.map(value => value === null ? "" : isBytes ? bytes(value, splits[splits.length - 1]!, step) : latest.current.format(value)) },
    ],
    cursor: { y: false, drag: { x: !!props.onZoom, y: false, setScale: false }, points: { size: 7 }, ...(props.group ? { sync: { key: props.group, scales: ["x", null], filters: { pub: type => type === "mousemove" || type === "mouseleave" } } } : {}) },
    hooks: {
      drawClear: [plot => under(plot, latest.current)],
      draw: [plot => over(plot, latest.current)],
      setCursor: [plot => {
        const index = plot.cursor.idx;
        if (index === null || index === undefined || plot.cursor.left === undefined || plot.cursor.left < 0) { say(""); return; }
        const now = latest.current, x = plot.data[0][index]!, texts = [`${now.xLabel ?? (now.isTime ? "" : "step")} ${title(x)}`.trim()];
        let column = 1;
        for (const line of now.lines) {
          const value = plot.data[column]?.[index], high = line.high ? plot.data[column + 1]?.[index] : null, low = line.low ? plot.data[column + 2]?.[index] : null;
          if (finite(value as N)) texts.push(`${line.label} ${now.format(value as N)}${finite(low as N) && finite(high as N) && low !== high ? ` (${now.format(low as N)} to ${now.format(high as N)})` : ""}`);
          column += line.low && line.high ? 3 : 1;
        }
        const mark = near(plot, now);
        if (mark) texts.push(`${mark.label}${finite(mark.y) && mark.kind === "point" ? ` ${now.format(mark.y)}` : ""}`);
        say(texts.join(" · "));
      }],
      setSelect: [plot => {
        const { left, width: selected } = plot.select;
        inUse = plot.root.parentElement;
        if (selected > 4) latest.current.onZoom?.(plot.posToVal(left, "x"), plot.posToVal(left + selected, "x"));
        plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      }],
      ready: [plot => {
        plot.over.addEventListener("click", () => { const mark = near(plot, latest.current); if (mark?.id !== undefined) latest.current.onMark?.(mark.id); });
        plot.over.addEventListener("dblclick", () => { inUse = plot.root.parentElement; latest.current.onZoom?.(null, null); });
      }],
    },
  };
}

function near(plot: uPlot, props: ChartProps): Mark | null {
  const left = plot.cursor.left ?? -1;
  let best: Mark | null = null, distance = 7;
  for (const mark of props.marks ?? []) { const away = Math.abs(plot.valToPos(mark.x, "x") - left); if (away < distance) { best = mark; distance = away; } }
  return best;
}

function clipped(plot: uPlot, room: number, draw: (context: CanvasRenderingContext2D, ratio: number) => void) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left - room, bbox.top - room, bbox.width + 2 * room, bbox.height + 2 * room);
  ctx.clip();
  draw(ctx, ctx.canvas.width / plot.width);
  ctx.restore();
}

// More marks than this would hide the curve: they become short, or small.
const MANY = 16;

function under(plot: uPlot, props: ChartProps) {
  const colors = theme();
  clipped(plot, 0, (context, ratio) => {
    const { bbox } = plot, band = props.band;
    if (band && finite(band.low) && finite(band.high)) {
      const top = plot.valToPos(band.high, "y", true), bottom = plot.valToPos(band.low, "y", true);
      context.fillStyle = `${colors.good}22`;
      context.fillRect(bbox.left, top, bbox.width, bottom - top);
    }
    if (band && finite(band.middle)) {
      const y = plot.valToPos(band.middle, "y", true);
      context.strokeStyle = colors.good; context.lineWidth = ratio; context.setLineDash([4 * ratio, 4 * ratio]);
      context.beginPath(); context.moveTo(bbox.left, y); context.lineTo(bbox.left + bbox.width, y); context.stroke(); context.setLineDash([]);
    }
    const ticks = (props.marks ?? []).filter(mark => mark.kind === "tick"), top = ticks.length > MANY ? bbox.top + bbox.height - 14 * ratio : bbox.top;
    for (const mark of ticks) {
      const x = plot.valToPos(mark.x, "x", true);
      context.strokeStyle = colors[mark.color]; context.globalAlpha = 0.6; context.lineWidth = ratio;
      context.beginPath(); context.moveTo(x, top); context.lineTo(x, bbox.top + bbox.height); context.stroke(); context.globalAlpha = 1;
    }
  });
}

function over(plot: uPlot, props: ChartProps) {
  const colors = theme();
  clipped(plot, 6, (context, ratio) => {
    const faint = props.faint;
    if (faint) {
      context.fillStyle = colors.muted;
      context.globalAlpha = 0.5;
      const low = plot.scales.x!.min!, high = plot.scales.x!.max!;
      faint.x.forEach((x, index) => { const y = faint.y[index]; if (finite(x) && finite(y) && x >= low && x <= high) context.fillRect(plot.valToPos(x, "x", true) - ratio, plot.valToPos(y, "y", true) - ratio, 2 * ratio, 2 * ratio); });
      context.globalAlpha = 1;
    }
    const points = (props.marks ?? []).filter(mark => mark.kind !== "tick" && finite(mark.y)), radius = points.length > 2 * MANY ? 2.5 : 4;
    for (const mark of points) {
      context.beginPath();
      context.arc(plot.valToPos(mark.x, "x", true), plot.valToPos(mark.y!, "y", true), radius * ratio, 0, 2 * Math.PI);
      context.fillStyle = colors[mark.color]; context.strokeStyle = colors.paper; context.lineWidth = ratio;
      context.fill();
      if (radius > 3) context.stroke();
    }
  });
}
