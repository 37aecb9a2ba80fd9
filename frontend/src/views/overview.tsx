import { type Curve, type Header, type N, now } from "../api";
import { Chart, type ChartProps, type Mark } from "../chart";
import * as f from "../format";
import { Figure, Figures, Nothing } from "../parts";
import { change, rangeOf, type Route } from "../route";

export interface Overview {
  header: Header; curve: Curve; figures: Record<string, N>; promise: Record<string, N>; undone: { x: N[]; y: N[]; count: number };
  evaluations: { step: number; loss: N }[]; skipped: { step: number; reason: string; loss: N }[]; failures: { step: number; id: number; cause: string; rank: N }[];
}

export function zoomOf(route: Route) {
  return {
    onZoom: (low: number | null, high: number | null) => change(route, { from: low === null ? null : Math.floor(low), to: high === null ? null : Math.ceil(high) }),
    zoomed: route.query.has("from") || route.query.has("to"),
    range: rangeOf(route),
  };
}

export function OverviewView({ data, route }: { data: Overview; route: Route }) {
  const { header, figures, promise, curve } = data, logs = (route.query.get("log") ?? "").split(",").filter(name => name);
  if (!curve.x.length && !figures.tokens) return <Nothing>{header.program?.length ? "A program of the user's own writes no steps: see Ranks and Failures." : "No step is complete yet. The first one appears here by itself."}</Nothing>;
  const shared = { x: curve.x, group: "steps", ...zoomOf(route) };
  function chart(name: string, title: string, format: f.Formatter, more: Partial<ChartProps> = {}) {
    const line = curve.y[name];
    if (!line) return null;
    const onLog = (log: boolean) => change(route, { log: (log ? [...logs, name] : logs.filter(other => other !== name)).join(",") || null });
    return <Chart key={name} {...shared} title={title} format={format} lines={[{ label: more.xLabel ?? title, values: line.mean, low: line.min, high: line.max }]} value={format(figures[name])} log={logs.includes(name)} {...(["loss", "grad_norm"].includes(name) ? { onLog } : {})} {...more} />;
  }
  const lossMarks: Mark[] = [
    ...data.skipped.map(step => ({ x: step.step, label: `skipped step: ${step.reason}`, kind: "tick" as const, color: "warn" as const })),
    ...data.failures.map(row => ({ x: row.step, label: `failure: ${row.cause}${row.rank === null ? "" : `, rank ${row.rank}`}`, kind: "tick" as const, color: "limit" as const, id: row.id })),
    ...data.evaluations.map(row => ({ x: row.step, y: row.loss, label: "held-out loss", kind: "point" as const, color: "second" as const })),
  ];
  const promised = promise.seconds !== null && promise.seconds !== undefined;
  const ends = header.state === "running" && header.time_left !== null ? `about ${f.moment(now() + header.time_left)}` : undefined;
  return (
    <>
      <Figures>
        <Figure name="loss" value={f.loss(figures.loss)} more={`from ${f.loss(figures.first_loss)}`} />
        <Figure name="held-out loss" value={f.loss(figures.eval_loss)} />
        <Figure name="tokens/s" value={f.count(figures.recent_tokens_per_second)} more={promised ? `promised ${f.count(promise.tokens_per_second)}` : undefined} />
        <Figure name="MFU" value={f.percent(figures.mfu)} more={promised && promise.mfu !== null ? `promised ${f.percent(promise.mfu)}` : undefined} />
        <Figure name="step time" value={f.short(figures.step_seconds)} more={promised ? `promised ${f.short(promise.seconds)}` : undefined} />
        <Figure name="tokens" value={f.count(figures.tokens)} />
        <Figure name={header.state === "running" ? "time left" : "duration"} value={header.state === "running" ? f.duration(header.time_left) : f.duration(header.elapsed)} more={ends ?? (header.state === "running" ? undefined : `${header.launches} launch${header.launches === 1 ? "" : "es"}`)} />
        <Figure name="price so far" value={f.dollars(header.price)} more={header.price === null ? "the plan has no price" : `${f.dollars(header.price_end)} at the end`} />
        {(figures.skipped || figures.steps_lost || header.failures) ? <Figure name="failures" value={f.whole(header.failures)} more={`${f.whole(figures.steps_lost)} steps repeated, ${f.whole(figures.skipped)} skipped`} tone={header.failures ? "bad" : undefined} /> : null}
      </Figures>
      <div class="charts">
        <div class="wide">{chart("loss", "loss", f.loss, { height: 320, marks: lossMarks, faint: { x: data.undone.x, y: data.undone.y, label: "undone and repeated" }, xLabel: undefined, hint: "drag to zoom, double-click for the whole range" })}</div>
        {chart("tokens_per_second", "tokens/s", f.count, { value: f.count(figures.recent_tokens_per_second) })}
        {chart("mfu", "MFU", f.percent)}
        {chart("grad_norm", "gradient norm", f.small)}
        {chart("learning_rate", "learning rate", f.small)}
        {chart("seconds", "step time", f.short, promised ? { band: { low: promise.low!, high: promise.high!, middle: promise.seconds!, label: "promised, P10–P90" }, value: f.short(figures.step_seconds) } : { value: f.short(figures.step_seconds) })}
        {chart("memory", "memory of the fullest rank", f.size)}
        {chart("preferred", "pairs preferred", f.percent)}
        {chart("reward", "reward", f.small)}
      </div>
    </>
  );
}
