import type { Curve, Header, N, Note } from "../api";
import { Chart, type Mark } from "../chart";
import * as f from "../format";
import { Drawing, Figure, Figures, Nothing, Table } from "../parts";
import { change, link, rangeOf, type Route } from "../route";
import { theme } from "../theme";

interface Recovery { action: string; source: string; step: N; steps_lost: N; ranks: N; noticed: N; decided: N; restarted: N; first_step: N; seconds: N; generation: N; time: N; }
interface Failure { id: number; number: N; rank: N; node: N; step: N; cause: string; message: string; traceback: string; time: N; recovery: Recovery | null; }
export interface Failures { header: Header; failures: Failure[]; total: number; recoveries: Recovery[]; happenings: Note[]; ended: { state: string; reason: string; traceback: string; rank: N; time: N } | null; launches: { time: N; last: N; ranks: N; step: number }[]; progress: Curve; figures: Record<string, N>; }

const PHASES: [string, keyof Recovery, keyof Recovery, string][] = [["decided", "noticed", "decided", "#e69f00"], ["ranks restored", "decided", "restarted", "#0072b2"], ["first step", "restarted", "first_step", "#009e73"]];
const spent = (recovery: Recovery, from: keyof Recovery, to: keyof Recovery) => Math.max(0, ((recovery[to] as N) ?? 0) - ((recovery[from] as N) ?? 0));

export function FailuresView({ data, route }: { data: Failures; route: Route }) {
  const { figures, failures, progress } = data, chosen = Number(route.query.get("failure")), drawn = failures.filter(row => row.recovery).slice(0, 20).reverse();
  const stepAt = (time: number) => { const at = progress.x.findIndex(x => x >= time); return progress.y.step?.mean[at < 0 ? progress.x.length - 1 : Math.max(0, at - 1)] ?? null; };
  const marks: Mark[] = [
    ...failures.filter(row => row.time !== null).map(row => ({ x: row.time!, y: stepAt(row.time!), label: `failure: ${row.id}, ${row.message.slice(0, 120)}`, kind: "point" as const, color: "limit" as const, id: row.id })),
    ...data.launches.filter(row => row.time !== null).map(row => ({ x: row.time!, label: "launch", kind: "tick" as const, color: "good" as const })),
  ];
  return (
    <>
      <Figures>
        <Figure name="failures" value={f.whole(data.total)} tone={data.total ? "bad" : "good"} />
        <Figure name="recoveries" value={f.whole(figures.recovered)} />
        <Figure name="steps repeated" value={f.whole(figures.steps_lost)} />
        <Figure name="time lost" value={f.duration(figures.seconds_lost)} more="from each failure to the next step" />
        <Figure name="useful time" value={f.percent(figures.useful)} more="steps that count, of all time" />
      </Figures>
      {data.ended?.state === "failed" && <section class="card severe"><h2>the run has failed</h2><p>{data.ended.rank !== null && <>rank {data.ended.rank}: </>}{data.ended.reason}</p>{data.ended.traceback && <pre tabIndex={0}>{data.ended.traceback}</pre>}</section>}
      {progress.x.length > 1 && <div class="charts"><div class="wide">
        <Chart title="steps over time" value={f.whole(data.header.step)} x={progress.x} isTime lines={[{ label: "step", values: progress.y.step!.mean, low: progress.y.step!.min, high: progress.y.step!.max }]} format={f.whole} marks={marks} height={260} group="time" onMark={id => change(route, { failure: id })} onZoom={(low, high) => change(route, { from: low, to: high })} zoomed={route.query.has("from")} range={rangeOf(route)} hint="click a failure for its story" />
      </div></div>}
      {drawn.length > 0 && <Drawing title="recoveries by phase" label={drawn.map(row => `failure ${row.id}: ${f.short(row.recovery!.seconds)}`).join("; ")} height={() => 24 * drawn.length + 4} rows={() => ({ columns: ["failure", "cause", "action", "decided [s]", "ranks restored [s]", "first step [s]", "total [s]", "steps lost"], rows: failures.filter(row => row.recovery).map(row => [row.id, row.cause, row.recovery!.action, ...PHASES.map(([, from, to]) => spent(row.recovery!, from, to)), row.recovery!.seconds, row.recovery!.steps_lost]) })}
        draw={width => { const colors = theme(), most = Math.max(...drawn.map(row => row.recovery!.seconds ?? 0)) || 1; return drawn.map((row, index) => { let at = 84; return <g key={row.id}><text x={0} y={24 * index + 15} fill={colors.muted}>failure {row.id}</text>{PHASES.map(([name, from, to, color]) => { const wide = (width - 160) * spent(row.recovery!, from, to) / most, left = at; at += wide; return <rect key={name} x={left} y={24 * index + 4} width={Math.max(0, wide)} height={14} fill={color} />; })}<text x={at + 6} y={24 * index + 16} fill={colors.ink}>{f.short(row.recovery!.seconds)}</text></g>; }); }}>
        <p class="legend">{PHASES.map(([name, , , color]) => <span key={name}><i class="key area" style={{ background: color }} />{name}</span>)}<span>{drawn.length < failures.length ? `the newest ${drawn.length} of ${f.whole(data.total)}` : ""}</span></p>
      </Drawing>}
      {!failures.length ? <Nothing>Nothing has failed.</Nothing> : <section class="card"><h2>failures, the newest first</h2>{data.total > failures.length && <p class="muted">The newest {failures.length} of {f.whole(data.total)}.</p>}<div class="list">{failures.map(row => <Entry key={row.id} row={row} open={row.id === chosen} route={route} />)}</div></section>}
      {data.happenings.length > 0 && <section class="card"><h2>warnings and other records</h2><Table label="warnings and other records" head={["time", "kind", "step", "rank", ""]} numbers={[2, 3]} rows={data.happenings.slice(0, 100).map(note => [<time>{f.moment(note.time)}</time>, note.kind.replaceAll("_", " "), note.step ?? "", note.rank === null ? "" : <a href={link(route.run, "ranks", { rank: note.rank })}>{note.rank}</a>, note.text])} /></section>}
    </>
  );
}

function Entry({ row, open, route }: { row: Failure; open: boolean; route: Route }) {
  const recovery = row.recovery;
  return (
    <details class="entry" open={open} id={`failure-${row.id}`} ref={node => { if (node && open && !node.dataset.shown) { node.dataset.shown = "1"; node.scrollIntoView({ block: "nearest" }); } }}>
      <summary onClick={() => { if (!open) change(route, { failure: row.id }); }}><b class="bad">{row.id}</b> <time>{f.moment(row.time)}</time> <span>{row.message || row.cause}</span> <span class="muted">{recovery ? `${recovery.action} in ${f.short(recovery.seconds)}${recovery.steps_lost ? `, ${recovery.steps_lost} steps repeated` : ""}` : "not recovered"}</span></summary>
      <dl class="pairs">
        <dt>cause</dt><dd>{row.cause}</dd>
        {row.rank !== null && <><dt>rank</dt><dd><a href={link(route.run, "ranks", { rank: row.rank })}>{row.rank}</a>{row.node !== null ? `, node ${row.node}` : ""}</dd></>}
        <dt>after step</dt><dd>{row.step ?? f.UNKNOWN}</dd>
        {recovery && <><dt>detected</dt><dd>{f.moment(recovery.noticed)}</dd><dt>decided</dt><dd>{recovery.action}, {f.short(spent(recovery, "noticed", "decided"))} later</dd><dt>ranks restored</dt><dd>{recovery.ranks} ranks, state from {recovery.source}, {f.short(spent(recovery, "decided", "restarted"))} later</dd><dt>first step</dt><dd>after step {recovery.step}, {f.short(spent(recovery, "restarted", "first_step"))} later; {recovery.steps_lost} steps repeated</dd></>}
      </dl>
      {row.traceback && <pre tabIndex={0}>{row.traceback}</pre>}
    </details>
  );
}
