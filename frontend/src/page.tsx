// The page: header, navigation, help, and the view that the address names.
import "uplot/dist/uPlot.min.css";
import "./page.css";
import { Component, type ComponentChildren, render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { chartWidth, type Header, now, type RunLine, useApi, viewUrl } from "./api";
import * as f from "./format";
import { Nothing, State } from "./parts";
import { go, link, type Route, useRoute } from "./route";
import { isDark, onTheme, setTheme } from "./theme";
import { CompareView, RunsView } from "./views/compare";
import { FailuresView } from "./views/failures";
import { ExpertsView } from "./views/experts";
import { CheckpointsView, DataView, SamplesView } from "./views/others";
import { OverviewView } from "./views/overview";
import { PipelineView } from "./views/pipeline";
import { PromiseView } from "./views/promise";
import { RanksView } from "./views/ranks";

// eslint-disable-next-line @typescript-eslint/no-explicit-any
type AnyView = (props: { data: any; route: Route }) => ComponentChildren;
const VIEWS: Record<string, [string, AnyView]> = {
  overview: ["Overview", OverviewView], promise: ["Promise", PromiseView], ranks: ["Ranks", RanksView], failures: ["Failures", FailuresView], checkpoints: ["Checkpoints", CheckpointsView],
  data: ["Data", DataView], samples: ["Samples", SamplesView], experts: ["Experts", ExpertsView], pipeline: ["Pipeline", PipelineView],
};
const NAMES = Object.keys(VIEWS);

class Guard extends Component<{ children: ComponentChildren; at: string }, { error: string | null; at: string }> {
  override state = { error: null as string | null, at: this.props.at };
  static override getDerivedStateFromError(error: unknown) { return { error: String(error) }; }
  override componentDidUpdate() { if (this.state.at !== this.props.at) this.setState({ error: null, at: this.props.at }); }
  override render() { return this.state.error && this.state.at === this.props.at ? <Nothing>This view cannot be drawn: {this.state.error}</Nothing> : this.props.children; }
}

function Page() {
  const route = useRoute(), list = useApi<{ folder: string; runs: RunLine[] }>("api/runs", () => route.run === null);
  const runs = list.data?.runs ?? [], only = runs.length === 1 && route.run === null && route.view === "runs" ? runs[0]!.name : null;
  useEffect(() => { if (only !== null) go(link(only, "overview"), true); }, [only]);
  const [help, setHelp] = useState(false), keys = useRef({ route, runs });
  keys.current = { route, runs };
  useEffect(() => {
    const pressed = (event: KeyboardEvent) => key(event, keys.current.route, () => setHelp(shown => !shown));
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
  return (
    <>
      <a class="skip" href="#main" onClick={event => { event.preventDefault(); document.getElementById("main")?.focus(); }}>to the content</a>
      <Top runs={runs} route={route} folder={list.data?.folder ?? ""} onHelp={() => setHelp(true)} />
      {route.run !== null ? <RunPage key={route.run} route={route} run={route.run} /> : (
        <main id="main" tabIndex={-1}>
          {list.error && <p class="banner" role="status">{list.error}</p>}
          <Guard at={route.view}>{route.view === "compare" ? <CompareView route={route} all={runs} /> : list.data ? <RunsView runs={runs} route={route} /> : <Nothing>loading</Nothing>}</Guard>
        </main>
      )}
      {help && <Help onClose={() => setHelp(false)} />}
    </>
  );
}

function key(event: KeyboardEvent, route: Route, toggleHelp: () => void) {
  const target = event.target as HTMLElement;
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName)) return;
  if (event.key === "?") toggleHelp();
  else if (event.key === "t") setTheme(isDark() ? "light" : "dark");
  else if (event.key === "r") go(link(null, "runs"));
  else if (route.run !== null && /^[1-9]$/.test(event.key)) { const view = NAMES[Number(event.key) - 1]; if (view) go(link(route.run, view)); }
}

function Top({ runs, route, folder, onHelp }: { runs: RunLine[]; route: Route; folder: string; onHelp: () => void }) {
  const [dark, setDark] = useState(isDark());
  useEffect(() => onTheme(() => setDark(isDark())), []);
  return (
    <header class="top">
      <a class="brand" href="#/">phalanx</a>
      {runs.length > 1 || route.run === null ? <label class="choice"><span class="hidden">run</span><select value={route.run ?? ""} onChange={event => go(event.currentTarget.value ? link(event.currentTarget.value, "overview") : link(null, "runs"))}><option value="">all runs{folder ? ` in ${folder}` : ""}</option>{runs.map(run => <option key={run.name} value={run.name}>{run.name}</option>)}</select></label> : <h1 class="only">{route.run}</h1>}
      <span class="tools">
        <button type="button" onClick={() => setTheme(dark ? "light" : "dark")} aria-label={dark ? "light theme" : "dark theme"} title="t">{dark ? "☀" : "☾"}</button>
        <button type="button" onClick={onHelp} aria-label="help" title="?">?</button>
      </span>
    </header>
  );
}

function RunPage({ route, run }: { route: Route; run: string }) {
  const name = VIEWS[route.view] ? route.view : "overview", [, View] = VIEWS[name]!, [width, setWidth] = useState(chartWidth());
  useEffect(() => { const resized = () => setWidth(chartWidth()); addEventListener("resize", resized); return () => removeEventListener("resize", resized); }, []);
  const zoom = { from: route.query.get("from"), to: route.query.get("to") }, chosen = name === "pipeline" ? { step: route.query.get("step"), copy: route.query.get("copy") } : {}, url = viewUrl(run, name, { width, ...zoom, ...chosen });
  const { data, error, asked } = useApi<{ header: Header }>(url, answer => answer.header.state === "running" || answer.header.progress < 1);
  const view = new URLSearchParams(asked.split("?")[1] ?? "").get("view");
  useEffect(() => { document.title = data ? `${data.header.name} ${data.header.step}/${data.header.steps}` : "phalanx watch"; }, [data]);
  return (
    <>
      {data && <Status header={data.header} />}
      <nav aria-label="views"><ul>{NAMES.map((each, index) => <li key={each}><a href={link(run, each)} aria-current={each === name ? "page" : undefined} ref={node => { if (node && each === name) showTab(node); }} title={String(index + 1)}>{VIEWS[each]![0]}{each === "failures" && data?.header.failures ? <b class="count">{data.header.failures}</b> : null}</a></li>)}<li><a href={link(null, "compare", new URLSearchParams({ run }))}>Compare</a></li></ul></nav>
      <main id="main" tabIndex={-1}>
        {error && <p class="banner" role="status">{error}</p>}
        {data && data.header.progress < 1 && <p class="banner reading" role="status">reading the events: {f.percent(data.header.progress)}</p>}
        {data && data.header.unreadable > 0 && <p class="banner" role="status">{f.whole(data.header.unreadable)} line{data.header.unreadable === 1 ? "" : "s"} of events.jsonl cannot be read and {data.header.unreadable === 1 ? "is" : "are"} not shown.</p>}
        {data && view === name ? <Guard at={name}><View data={data} route={route} /></Guard> : error && !data ? null : <Nothing>loading</Nothing>}
      </main>
    </>
  );
}

// On a phone the tabs scroll: the one of this view is in sight.
function showTab(node: HTMLElement) {
  const bar = node.closest("nav")!, left = node.offsetLeft - bar.offsetLeft;
  if (left < bar.scrollLeft || left + node.offsetWidth > bar.scrollLeft + bar.clientWidth) bar.scrollLeft = Math.max(0, left - 40);
}

function Status({ header }: { header: Header }) {
  const [, tick] = useState(0), running = header.state === "running";
  useEffect(() => { const timer = setInterval(() => tick(value => value + 1), 1000); return () => clearInterval(timer); }, []);
  const done = header.steps ? Math.min(1, header.step / header.steps) : 0, layout = header.layout ?? {};
  const degrees = [["pipeline", "PP"], ["data", "DP"], ["shard", "FSDP"], ["context", "CP"], ["tensor", "TP"], ["expert", "EP"]].filter(([axis]) => Number(layout[axis!]) > 1).map(([axis, short]) => `${short} ${String(layout[axis!])}`);
  const facts = [header.parameters ? `${f.count(header.parameters)} parameters` : null, header.ranks ? `${f.whole(header.ranks)} ${header.device ?? ""} rank${header.ranks === 1 ? "" : "s"}` : null, degrees.join(" × ") || null, header.compute, header.launches > 1 ? `${header.launches} launches` : null].filter(fact => fact);
  return (
    <section class="status" aria-label="state of the run">
      <p class="line"><State state={header.state} /> <b>step {f.whole(header.step)}{header.steps ? ` of ${f.whole(header.steps)}` : ""}</b>
        <span>{f.duration(header.elapsed)}{running && header.time_left !== null ? `, ${f.duration(header.time_left)} left` : ""}</span>
        {header.price !== null && <span>{f.dollars(header.price)}</span>}
        {running && header.last_time !== null && <span class="muted">last record {f.duration(Math.max(0, now() - header.last_time))} ago</span>}
        {header.reason && <span class="bad reason">{header.reason}</span>}</p>
      <p class="bar" role="progressbar" aria-label="steps" aria-valuemin={0} aria-valuemax={header.steps || 1} aria-valuenow={header.step}><i style={{ width: `${100 * done}%` }} /></p>
      <p class="facts muted">{facts.join(" · ")}</p>
    </section>
  );
}

function Help({ onClose }: { onClose: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => { dialog.current?.showModal(); }, []);
  const rows: [string, string][] = [["1 – 9", "a view of the run"], ["r", "all runs"], ["t", "light or dark"], ["Tab", "next chart, link or button"], ["← →", "read values of the chart that has the focus; Shift: faster"], ["+ −", "zoom into the chart, and out"], ["drag, double-click", "zoom into a chart, and out"], ["← ↑ → ↓, Enter", "move over ranks or layers, and show one"], ["?", "this help"]];
  return (
    <dialog ref={dialog} onClose={onClose} aria-labelledby="help-title">
      <h2 id="help-title">keys</h2>
      <dl class="pairs">{rows.map(([keys_, text]) => <><dt key={keys_}><kbd>{keys_}</kbd></dt><dd>{text}</dd></>)}</dl>
      <p class="muted">The address holds the state of the page: a link shows another person the same. PNG and CSV save a chart and its numbers.</p>
      <form method="dialog"><button>close</button></form>
    </dialog>
  );
}

const root = document.getElementById("page")!;
root.replaceChildren();
render(<Page />, root);
