import { useEffect, useRef, useState } from "preact/hooks";
import { type Header, type N, type Note, useApi, viewUrl } from "../api";
import { CardHead } from "../chart";
import { saveCanvas, saveCsv } from "../files";
import * as f from "../format";
import { Drawing, Nothing, Ramp, Table } from "../parts";
import { change, link, type Route } from "../route";
import { isDark, onTheme, ramp, theme } from "../theme";

interface Metric { name: string; unit: string; values: N[]; }
export interface Ranks { header: Header; ranks: number; axes: { name: string; size: number }[]; metrics: Metric[]; hosts: (string | null)[]; stragglers: Note[]; step: N; known: boolean; }
interface Story {
  rank: number; place: Record<string, number>; starts: { time: N; host: string; device: string; pid: number }[]; timed: { step: number; seconds: N; time: N; parts: Record<string, number> }[];
  accounted: Record<string, N>[]; placed: { applied: Record<string, string>; parameters: number; gradients: number; optimizer: number; files: number } | null; events: Note[]; labels: Record<string, string>; colors: Record<string, string>; log: string;
}
interface Cells { x: number[]; y: number[]; width: number; height: number; captions: string[]; }

const MAX_ROWS = 64;

// Places ranks so that those of one group are near each other: each axis, from the innermost outward, puts copies of the block before it in rows and
// columns with a gap that grows outward. Pipeline stages are always below each other.
function arrange(axes: { name: string; size: number }[], aspect: number): Cells {
  let block: Cells = { x: [0], y: [0], width: 1, height: 1, captions: [] }, gap = 0;
  const stages = axes.find(axis => axis.name === "pipeline")?.size ?? 1;
  aspect *= stages <= MAX_ROWS ? stages : 1;  // of one stage
  for (const axis of [...axes].reverse()) {
    if (axis.size <= 1) continue;
    let columns = 1, best = Infinity;
    for (let tried = 1; tried <= axis.size; tried++) {
      const rows = Math.ceil(axis.size / tried), shape = (tried * (block.width + gap)) / (rows * (block.height + gap));
      const cost = Math.abs(Math.log(shape / aspect)) + (axis.size % tried ? 0.5 : 0);
      if (cost < best) { best = cost; columns = tried; }
    }
    if (axis.name === "pipeline" && axis.size <= MAX_ROWS) columns = 1;
    const x: number[] = [], y: number[] = [];
    for (let copy = 0; copy < axis.size; copy++) {
      const left = (copy % columns) * (block.width + gap), top = Math.floor(copy / columns) * (block.height + gap);
      for (let index = 0; index < block.x.length; index++) { x.push(left + block.x[index]!); y.push(top + block.y[index]!); }
    }
    const rows = Math.ceil(axis.size / columns);
    block = { x, y, width: columns * (block.width + gap) - gap, height: rows * (block.height + gap) - gap, captions: [...block.captions, `${axis.name} ${axis.size}${columns === 1 ? " (rows)" : columns === axis.size ? " (columns)" : ` (${rows} × ${columns})`}`] };
    gap += 0.5;
  }
  return block;
}

export function RanksView({ data, route }: { data: Ranks; route: Route }) {
  const metric = data.metrics.find(each => each.name === route.query.get("color")) ?? (data.known ? data.metrics.find(each => each.values.some(value => value !== null)) : undefined) ?? data.metrics[0]!;
  const chosen = route.query.get("rank") === null ? null : Number(route.query.get("rank"));
  if (!data.ranks) return <Nothing>No rank has reported yet.</Nothing>;
  const format = f.byUnit(metric.unit), known = metric.values.map((value, rank) => ({ value, rank })).filter((row): row is { value: number; rank: number } => row.value !== null);
  const sorted = [...known].sort((a, b) => b.value - a.value), median = sorted[Math.floor(sorted.length / 2)]?.value ?? null;
  const choose = (rank: number | null) => change(route, { rank });
  return (
    <>
      <p class="tools-row">
        <label>color <select value={metric.name} onChange={event => change(route, { color: event.currentTarget.value })}>{data.metrics.map(each => <option key={each.name} value={each.name}>{each.name}</option>)}</select></label>
        <label>rank <input type="number" min={0} max={data.ranks - 1} value={chosen ?? ""} onChange={event => choose(event.currentTarget.value === "" ? null : Math.min(data.ranks - 1, Math.max(0, Number(event.currentTarget.value))))} /></label>
        {!data.known && <span class="muted" role="status">records of ranks are still being read</span>}
      </p>
      <Picture data={data} metric={metric} chosen={chosen} choose={choose} />
      {data.stragglers.length > 0 && <section class="card"><h2>stragglers</h2><ul class="plain">{data.stragglers.slice(-8).reverse().map(note => <li key={`${note.time}${note.rank}`}><a href={link(route.run, "ranks", { rank: note.rank })}>{note.text}</a></li>)}</ul></section>}
      <div class="charts">
        {chosen !== null && Number.isInteger(chosen) && chosen >= 0 && chosen < data.ranks ? <div class="wide"><StoryCard run={route.run!} rank={chosen} route={route} /></div> : <section class="card"><h2>a rank</h2><p class="muted">Click a rank, or move with the arrow keys in the picture, for its story.</p></section>}
        <section class="card"><h2>most {metric.name}</h2>
          <Table label={`ranks with most ${metric.name}`} numbers={[1, 2]} head={["rank", metric.name, "of the median", "host"]} rows={sorted.slice(0, 8).map(row => [<a href={link(route.run, "ranks", { color: metric.name, rank: row.rank })}>rank {row.rank}</a>, format(row.value), median ? f.times(row.value / median) : f.UNKNOWN, data.hosts[row.rank] ?? f.UNKNOWN])} />
        </section>
      </div>
    </>
  );
}

function Picture({ data, metric, chosen, choose }: { data: Ranks; metric: Metric; chosen: number | null; choose: (rank: number) => void }) {
  const canvas = useRef<HTMLCanvasElement>(null), place = useRef<HTMLDivElement>(null), [width, setWidth] = useState(0), [colors, setColors] = useState(0), [hover, setHover] = useState<number | null>(null);
  useEffect(() => onTheme(() => setColors(value => value + 1)), []);
  useEffect(() => { const observer = new ResizeObserver(entries => setWidth(Math.floor(entries[0]!.contentRect.width))); observer.observe(place.current!); return () => observer.disconnect(); }, []);
  const cells = arrange(data.axes, width < 500 ? 0.9 : 2.6), size = Math.max(2, Math.min(44, Math.floor((width - 4) / cells.width))), height = Math.ceil(cells.height * size) + 4;
  const format = f.byUnit(metric.unit), values = metric.values.filter((value): value is number => value !== null), low = Math.min(...values), high = Math.max(...values);
  useEffect(() => {
    const node = canvas.current, context = node?.getContext("2d");
    if (!node || !context || !width) return;
    const ratio = devicePixelRatio || 1, theme_ = theme();
    node.width = width * ratio; node.height = height * ratio;
    context.scale(ratio, ratio);
    context.clearRect(0, 0, width, height);
    for (let rank = 0; rank < data.ranks; rank++) {
      const value = metric.values[rank] ?? null, x = 2 + cells.x[rank]! * size, y = 2 + cells.y[rank]! * size, edge = size > 4 ? 1 : 0;
      context.fillStyle = value === null ? theme_.grid : ramp(high > low ? (value - low) / (high - low) : 0.4);
      context.fillRect(x, y, size - edge, size - edge);
      if (size >= 24) {
        const fraction = value === null ? 0 : high > low ? (value - low) / (high - low) : 0.4;
        context.fillStyle = isDark() ? (fraction > 0.6 ? "#18212b" : "#e4e7eb") : fraction > 0.45 ? "#ffffff" : "#1f2933";
        context.font = "11px system-ui, sans-serif"; context.textAlign = "center"; context.textBaseline = "middle";
        context.fillText(String(rank), x + size / 2, y + size / 2);
      }
    }
    for (const [rank, color] of [[hover, theme_.ink], [chosen, theme_.limit]] as const) if (rank !== null && rank < data.ranks) {
      context.strokeStyle = color; context.lineWidth = 2;
      context.strokeRect(1 + cells.x[rank]! * size, 1 + cells.y[rank]! * size, size + 1, size + 1);
    }
  }, [data, metric, width, colors, hover, chosen]);
  function at(event: MouseEvent): number | null {
    const box = canvas.current!.getBoundingClientRect(), x = (event.clientX - box.left - 2) / size, y = (event.clientY - box.top - 2) / size;
    const found = cells.x.findIndex((left, rank) => x >= left && x < left + 1 && y >= cells.y[rank]! && y < cells.y[rank]! + 1);
    return found < 0 || found >= data.ranks ? null : found;
  }
  function key(event: KeyboardEvent) {
    const from = hover ?? chosen ?? 0;
    if (event.key === "Enter" || event.key === " ") { choose(from); event.preventDefault(); return; }
    const move = ({ ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] } as Record<string, [number, number]>)[event.key];
    if (!move) return;
    let best = from, distance = Infinity;
    cells.x.forEach((x, rank) => {
      const along = (x - cells.x[from]!) * move[0] + (cells.y[rank]! - cells.y[from]!) * move[1], across = Math.abs((x - cells.x[from]!) * move[1]) + Math.abs((cells.y[rank]! - cells.y[from]!) * move[0]);
      if (along > 0.5 && along + 3 * across < distance && rank < data.ranks) { best = rank; distance = along + 3 * across; }
    });
    setHover(best);
    event.preventDefault();
  }
  const read = hover ?? chosen, shown = read === null || read >= data.ranks ? `${f.whole(data.ranks)} ranks${data.step === null ? "" : `, measured in step ${f.whole(data.step)}`}` : `rank ${read}: ${metric.name} ${format(metric.values[read] ?? null)}${data.hosts[read] ? `, host ${data.hosts[read]}` : ""}`;
  return (
    <section class="card">
      <CardHead title={`ranks by ${metric.name}`} onPng={() => saveCanvas(`ranks by ${metric.name}`, canvas.current!, width, height, devicePixelRatio || 1)}
        onCsv={() => saveCsv("ranks", { columns: ["rank", "host", ...data.metrics.map(each => `${each.name} [${each.unit}]`)], rows: Array.from({ length: data.ranks }, (_, rank) => [rank, data.hosts[rank] ?? "", ...data.metrics.map(each => each.values[rank] ?? null)]) })} />
      <div class="drawing grid" ref={place} tabIndex={0} role="group" aria-roledescription="picture of ranks" aria-label={`${data.ranks} ranks, colored by ${metric.name}; arrow keys move, Enter shows a rank`} onKeyDown={key} onBlur={() => setHover(null)}>
        <canvas ref={canvas} style={{ width: `${width}px`, height: `${height}px` }} aria-hidden="true" onMouseMove={event => setHover(at(event))} onMouseLeave={() => setHover(null)} onClick={event => { const rank = at(event); if (rank !== null) choose(rank); }} />
      </div>
      <p class="readout" aria-live="polite">{shown}</p>
      <p class="legend">{values.length ? <><span>{format(low)} <Ramp /> {format(high)}</span><span>{cells.captions.length ? `innermost first: ${cells.captions.join(", ")}` : ""}</span></> : "nothing measured yet: an early step of each launch is"}</p>
    </section>
  );
}

function StoryCard({ run, rank, route }: { run: string; rank: number; route: Route }) {
  const { data } = useApi<Story & { header: Header }>(viewUrl(run, "rank", { rank }), story => story.header.state === "running");
  if (!data || data.rank !== rank) return <section class="card"><h2>rank {rank}</h2><p class="muted">loading</p></section>;
  const last = data.accounted[0], measured = data.timed.slice(-8), start = data.starts[data.starts.length - 1];
  const happened = [...data.events, ...data.starts.map(row => ({ kind: "worker_started", time: row.time, step: null, rank, text: `started on ${row.host}, process ${row.pid}, ${row.device}`, severe: false }))].sort((a, b) => (b.time ?? 0) - (a.time ?? 0)) as Note[];
  return (
    <section class="card story">
      <header class="card-head"><h2>rank {rank}</h2><span class="muted">{Object.entries(data.place).reverse().map(([axis, index]) => `${axis} ${index}`).join(", ")}{start ? ` · ${start.host}, process ${start.pid}` : ""}</span><span class="tools"><button type="button" onClick={() => change(route, { rank: null })}>close</button></span></header>
      {data.placed && <dl class="pairs">{Object.entries(data.placed.applied).map(([name, text]) => <><dt key={name}>{name}</dt><dd>{text}</dd></>)}</dl>}
      {last && <p>Peak of step {f.whole(last.step)}: parameters {f.size(last.parameters)}, gradients {f.size(last.gradients)}, optimizer {f.size(last.optimizer)}, activations {f.size(last.activations)}; sent {f.size(last.sent)}.</p>}
      {measured.length > 0 && <Drawing title={`measured steps of rank ${rank}`} label={measured.map(row => `step ${row.step}: ${f.short(row.seconds)}`).join("; ")} height={() => 26 * measured.length} rows={() => ({ columns: ["step", "seconds", ...Object.keys(data.labels)], rows: measured.map(row => [row.step, row.seconds, ...Object.keys(data.labels).map(part => row.parts[part] ?? 0)]) })}
        draw={width => { const theme_ = theme(), most = Math.max(...measured.map(row => row.seconds ?? 0)) || 1; return measured.map((row, index) => { let at = 84; return <g key={index}><text x={0} y={26 * index + 15} fill={theme_.muted}>step {row.step}</text>{Object.keys(data.labels).map(part => { const wide = Math.max(0, (width - 150) * (row.parts[part] ?? 0) / most), left = at; at += wide; return wide > 0.3 ? <rect key={part} x={left} y={26 * index + 4} width={wide} height={15} fill={data.colors[part]} /> : null; })}<text x={at + 6} y={26 * index + 16} fill={theme_.ink}>{f.short(row.seconds)}</text></g>; }); }}>
        <p class="legend">{Object.entries(data.labels).filter(([part]) => measured.some(row => row.parts[part])).map(([part, label]) => <span key={part}><i class="key area" style={{ background: data.colors[part] }} />{label}</span>)}</p>
      </Drawing>}
      <h3>what happened</h3>
      <ul class="plain">{happened.slice(0, 30).map((note, index) => <li key={index} class={note.severe ? "bad" : undefined}><time>{f.moment(note.time)}</time> {note.step !== null && note.step !== undefined ? `step ${note.step}: ` : ""}{note.id !== undefined ? <a href={link(route.run, "failures", { failure: note.id })}>{note.text}</a> : note.text}</li>)}</ul>
      {data.log && <details><summary>end of its log</summary><pre tabIndex={0}>{data.log}</pre></details>}
    </section>
  );
}
