// A step of a pipeline: as the schedule orders it, and as the ranks executed it.
import type { Header, N } from "../api";
import * as f from "../format";
import { Drawing, Figure, Figures, Nothing } from "../parts";
import { change, type Route } from "../route";
import { theme } from "../theme";

type Action = [kind: string, stage: number, batch: number, start: number, stop: number];
interface Row { label: string; actions: Action[]; others: [name: string, start: number, stop: number][]; }
interface Executed { reason?: string; step?: number; first?: number; last?: number; steps?: number; ranks?: number[]; rows?: { actions: Action[]; others: Row["others"]; seconds: N }[]; bubble?: N; clock_error?: N; copies: number; copy: number; }
type Kinds = Record<string, { label: string; color: string }>;
export interface Pipeline { header: Header; pipeline: number; schedule: string | null; micro_batches: number; planned: N; measured: N; reason?: string; rows?: Action[][]; stop?: number; bubble?: number; kinds?: Kinds; executed?: Executed; }

export function PipelineView({ data, route }: { data: Pipeline; route: Route }) {
  const kinds = data.kinds, executed = data.executed;
  if (!kinds) return <Nothing>{data.reason}</Nothing>;
  const planned: Row[] = (data.rows ?? []).map((actions, rank) => ({ label: `rank ${rank}`, actions, others: [] }));
  return (
    <>
      <Figures>
        <Figure name="schedule" value={data.schedule ?? ""} more={`${data.pipeline} ranks, ${data.micro_batches} micro-batches`} />
        <Figure name="bubble of the schedule" value={f.percent(data.bubble)} more="if stages take equally long" />
        <Figure name="bubble as planned" value={f.percent(data.planned)} more="of the step" />
        <Figure name="bubble as measured" value={f.percent(data.measured)} more="of the step, mean over ranks" />
        {executed?.rows && <Figure name="bubble as executed" value={f.percent(executed.bubble)} more={`between the first and the last action of step ${f.whole(executed.step)}`} />}
      </Figures>
      <div class="charts">
        <div class="wide">{data.rows ? <Actions title="one step as the schedule orders it" rows={planned} kinds={kinds} stop={data.stop!} label={`${data.schedule}: ${data.pipeline} pipeline ranks, ${data.micro_batches} micro-batches, ${f.percent(data.bubble)} idle`} /> : <p class="muted">{data.reason}</p>}</div>
        {executed && <div class="wide">{executed.rows ? <ExecutedStep executed={executed} kinds={kinds} route={route} /> : <section class="card"><h2>one step as it was executed</h2><p class="muted">{executed.reason}</p></section>}</div>}
      </div>
    </>
  );
}

function ExecutedStep({ executed, kinds, route }: { executed: Executed; kinds: Kinds; route: Route }) {
  const rows = executed.rows!.map((row, stage) => ({ label: `rank ${executed.ranks![stage]}`, ...row })), stop = rows.reduce((most, row) => [...row.actions, ...row.others].reduce((end, each) => Math.max(end, each[each.length - 1] as number), most), 1e-6);
  const newest = route.query.get("step") === null, choose = (step: number) => change(route, { step: Math.min(executed.last!, Math.max(executed.first!, step)) });
  return (
    <>
      <p class="tools-row">
        <label>step <input type="number" min={executed.first} max={executed.last} value={executed.step} onChange={event => choose(Number(event.currentTarget.value) || executed.last!)} /></label>
        <span><button type="button" aria-label="step before" disabled={executed.step === executed.first} onClick={() => choose(executed.step! - 1)}>←</button> <button type="button" aria-label="step after" disabled={executed.step === executed.last} onClick={() => choose(executed.step! + 1)}>→</button> <button type="button" aria-pressed={newest} onClick={() => change(route, { step: newest ? executed.step! : null })}>newest</button></span>
        {executed.copies > 1 && <label>pipeline <input type="number" min={0} max={executed.copies - 1} value={executed.copy} onChange={event => change(route, { copy: Math.min(executed.copies - 1, Math.max(0, Number(event.currentTarget.value) || 0)) })} /> of {f.whole(executed.copies)}</label>}
        <span class="muted">{f.whole(executed.steps)} steps are recorded{executed.clock_error === null ? "; the clocks of the hosts were not compared: rows may be shifted" : executed.clock_error ? `; clocks agree within ${f.short(executed.clock_error)}` : ""}</span>
      </p>
      <Actions title={`step ${executed.step} as it was executed`} rows={rows} kinds={kinds} stop={stop} seconds label={`step ${executed.step}: ${f.percent(executed.bubble)} idle; ${rows.map(row => `${row.label} ${row.actions.length} actions`).join(", ")}`} />
    </>
  );
}

const OTHERS: Record<string, string> = { loading: "loading", reduce: "gradients summed", optimizer: "optimizer" };

/** Ticks of the axis: round seconds, at most so many. */
function ticks(stop: number, most: number): number[] {
  const rough = stop / most, unit = 10 ** Math.floor(Math.log10(rough)), each = [1, 2, 5, 10].map(factor => factor * unit).find(step => step >= rough)!;
  return Array.from({ length: Math.floor(stop / each) + 1 }, (_, index) => index * each);
}

function Actions({ title, rows, kinds, stop, label, seconds }: { title: string; rows: Row[]; kinds: Kinds; stop: number; label: string; seconds?: boolean }) {
  const used = new Set(rows.flatMap(row => row.actions.map(action => action[0]))), height = rows.length > 32 ? 12 : 26, axis = seconds ? 20 : 0, drawn = Object.keys(OTHERS).filter(name => rows.some(row => row.others.some(each => each[0] === name)));
  const color = (name: string) => { const colors = theme(); return name === "loading" ? colors.warn : name === "reduce" ? colors.second : colors.muted; };
  return (
    <Drawing title={title} label={label} height={() => height * rows.length + 4 + axis} rows={() => ({ columns: ["rank", "action", "stage", "micro-batch", seconds ? "start [s]" : "start", seconds ? "stop [s]" : "stop"], rows: rows.flatMap(row => [...row.actions.map(([kind, stage, batch, start, end]) => [row.label, kinds[kind]!.label, stage, batch, start, end]), ...row.others.map(([name, start, end]) => [row.label, OTHERS[name], null, null, start, end])]) })}
      draw={width => {
        const colors = theme(), left = width < 500 ? 30 : 56, scale = (width - left - 2) / stop, bottom = height * rows.length;
        return <>
          {rows.map((row, index) => <g key={index}>
            <text x={0} y={height * index + height / 2 + 4} fill={colors.muted}>{width < 500 ? row.label.replace("rank ", "") : row.label}</text>
            <rect x={left} y={height * index + 1} width={stop * scale} height={height - 3} fill={colors.grid} />
            {row.others.map(([name, start, end], at) => <rect key={`${name}${at}`} x={left + Math.max(0, start) * scale} y={height * index + 1} width={Math.max(0.5, (end - Math.max(0, start)) * scale)} height={height - 3} fill={color(name)}><title>{`${OTHERS[name]}, ${f.short(end - start)}`}</title></rect>)}
            {row.actions.map(([kind, stage, batch, start, end]) => <g key={`${kind}${stage}.${batch}`}><rect x={left + start * scale} y={height * index + 1} width={Math.max(0.5, (end - start) * scale - 0.7)} height={height - 3} fill={kinds[kind]!.color}><title>{`${kinds[kind]!.label}, stage ${stage}, micro-batch ${batch}${seconds ? `, ${f.short(end - start)} from ${f.short(start)} on` : ""}`}</title></rect>{(end - start) * scale > 20 && height > 20 && <text x={left + (start + end) / 2 * scale} y={height * index + 17} text-anchor="middle" fill="#111827" font-size={11}>{batch}</text>}</g>)}
          </g>)}
          {seconds && ticks(stop, Math.max(2, (width - left) / 110)).map(at => <text key={at} x={Math.min(width - 2, left + at * scale)} y={bottom + 16} text-anchor={at === 0 ? "start" : left + at * scale > width - 24 ? "end" : "middle"} fill={colors.muted}>{f.short(at)}</text>)}
        </>;
      }}>
      <p class="legend">{Object.entries(kinds).filter(([kind]) => used.has(kind)).map(([kind, each]) => <span key={kind}><i class="key area" style={{ background: each.color }} />{each.label}</span>)}{drawn.map(name => <span key={name}><i class="key area" style={{ background: color(name) }} />{OTHERS[name]}</span>)}<span><i class="key area idle" />{seconds ? "waiting" : "idle"}</span><span>number: micro-batch</span></p>
    </Drawing>
  );
}
