import { chartWidth, type Curve, type Header, type N, type RunLine, useApi } from "../api";
import { Chart, type Mark } from "../chart";
import * as f from "../format";
import { Nothing, State, Table } from "../parts";
import { change, go, link, rangeOf, type Route } from "../route";
import { runColor } from "../theme";

interface Compared { header: Header; curve: Curve; evaluations: [N, N][]; eval_loss: N; loss: N; tokens_per_second: N; tokens: N; }
interface Compare { runs: Compared[]; differences: { key: string; values: (string | null)[] }[]; figure: string; axis: string; }
const FIGURES: Record<string, [string, f.Formatter]> = { loss: ["loss", f.loss], tokens_per_second: ["tokens/s", f.count], grad_norm: ["gradient norm", f.small], learning_rate: ["learning rate", f.small], seconds: ["step time", f.short], mfu: ["MFU", f.percent], memory: ["memory", f.size] };
const AXES: Record<string, string> = { step: "step", tokens: "trained tokens", time: "seconds of training" };

export function RunsView({ runs, route }: { runs: RunLine[]; route: Route }) {
  const chosen = route.query.getAll("run");
  if (!runs.length) return <Nothing>There is no run in this folder yet. A run that starts here appears by itself.</Nothing>;
  return (
    <section class="card">
      <header class="card-head"><h2>{f.whole(runs.length)} run{runs.length === 1 ? "" : "s"}</h2><span class="tools"><button type="button" disabled={chosen.length < 2} onClick={() => { const params = new URLSearchParams(); chosen.forEach(name => params.append("run", name)); go(link(null, "compare", params)); }}>compare {chosen.length > 1 ? chosen.length : ""}</button></span></header>
      <Table label="runs" numbers={[3, 4, 5]} head={[<span class="hidden">compare</span>, "run", "state", "step", "loss", "held-out", "last record"]} rows={runs.map(run => [
        <input type="checkbox" aria-label={`compare ${run.name}`} checked={chosen.includes(run.name)} onChange={event => { const params = new URLSearchParams(); const others = chosen.filter(name => name !== run.name); (event.currentTarget.checked ? [...others, run.name] : others).slice(-8).forEach(name => params.append("run", name)); go(link(null, "runs", params), true); }} />,
        <a href={link(run.name, "overview")}>{run.name}</a>, <State state={run.state} />, run.steps ? `${f.whole(run.step)} of ${f.whole(run.steps)}` : f.whole(run.step), f.loss(run.loss), f.loss(run.eval_loss), <time>{f.moment(run.time)}</time>])} />
    </section>
  );
}

export function CompareView({ route, all }: { route: Route; all: RunLine[] }) {
  const names = route.query.getAll("run").slice(0, 8), figure = route.query.get("figure") ?? "loss", axis = route.query.get("axis") ?? "step", params = new URLSearchParams();
  names.forEach(name => params.append("run", name));
  for (const [key, value] of Object.entries({ figure, axis, from: route.query.get("from"), to: route.query.get("to"), width: String(chartWidth()) })) if (value) params.set(key, value);
  const { data, error } = useApi<Compare>(names.length ? `api/compare?${params}&pack=1` : null, answer => answer.runs.some(run => run.header.state === "running" || run.header.progress < 1));
  if (!names.length) return <><p>Choose two or more runs.</p><RunsView runs={all} route={{ ...route, view: "runs" }} /></>;
  if (error && !data) return <Nothing>{error}</Nothing>;
  if (!data) return <Nothing>loading</Nothing>;
  const [title, format] = FIGURES[data.figure] ?? FIGURES.loss!, marks: Mark[] = data.runs.length === 1 ? data.runs[0]!.evaluations.filter(([x]) => x !== null).map(([x, y]) => ({ x: x!, y, label: "held-out loss", kind: "point", color: "second" })) : [];
  const log = route.query.get("log") === "1";
  return (
    <>
      <p class="tools-row">
        <label>figure <select value={figure} onChange={event => change(route, { figure: event.currentTarget.value })}>{Object.entries(FIGURES).map(([key, [name]]) => <option key={key} value={key}>{name}</option>)}</select></label>
        <label>over <select value={axis} onChange={event => change(route, { axis: event.currentTarget.value, from: null, to: null })}>{Object.entries(AXES).map(([key, name]) => <option key={key} value={key}>{name}</option>)}</select></label>
        <a href={link(null, "runs", params)}>choose runs</a>
      </p>
      <Chart title={`${title} over ${AXES[data.axis]}`} xLabel={AXES[data.axis]} x={[]} lines={data.runs.map((run, index) => ({ label: run.header.name, color: runColor(index), x: run.curve.x, values: run.curve.y[data.figure]!.mean }))} marks={marks} format={format} height={360} value="" log={log} onLog={on => change(route, { log: on ? 1 : null })} onZoom={(low, high) => change(route, { from: low, to: high })} zoomed={route.query.has("from")} range={rangeOf(route)} />
      <section class="card"><h2>results</h2>
        <Table label="results" numbers={[2, 3, 4, 5, 6]} head={["run", "state", "step", "loss", "held-out", "tokens/s", "tokens"]} rows={data.runs.map(run => [<a href={link(run.header.name, "overview")}>{run.header.name}</a>, <State state={run.header.state} />, f.whole(run.header.step), f.loss(run.loss), f.loss(run.eval_loss), f.count(run.tokens_per_second), f.count(run.tokens)])} />
      </section>
      <section class="card"><h2>differences of their run files</h2>
        {data.runs.length < 2 ? <p class="muted">Choose a second run.</p> : data.differences.length ? <Table label="differences" head={["key", ...data.runs.map(run => run.header.name)]} rows={data.differences.map(row => [<code>{row.key}</code>, ...row.values.map(value => value ?? f.UNKNOWN)])} /> : <p class="muted">Their run files are the same.</p>}
      </section>
    </>
  );
}
