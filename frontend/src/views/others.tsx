// Checkpoints, data, samples.
import { useState } from "preact/hooks";
import type { Curve, Header, N, Note } from "../api";
import { Chart } from "../chart";
import * as f from "../format";
import { Figure, Figures, Nothing, Table } from "../parts";
import { runColor } from "../theme";

interface Save { kind: string; step: N; time: N; path?: string; url?: string; reason?: string; bytes?: N; seconds?: N; stall?: N; bytes_per_second?: N; difference?: N; }
export interface Checkpoints { header: Header; saves: Save[]; counts: Record<string, number>; curve: { x: number[]; y: Record<string, N[]> }; stall: number; on_disk: string[]; copies: { count: number; stall?: number; skipped?: number; last?: { step: number; bytes: N; peer: boolean } }; copy_curve: Curve; }

const tail = (path: string | undefined) => path?.split("/").filter(part => part).pop() ?? "";

export function CheckpointsView({ data }: { data: Checkpoints }) {
  const { counts, copies } = data, bad = (counts.save_failed ?? 0) + (counts.upload_failed ?? 0) + (counts.export_failed ?? 0) + (counts.checkpoint_damaged ?? 0);
  if (!data.saves.length && !copies.count) return <Nothing>Nothing is saved yet. `checkpoint.every` says how often.</Nothing>;
  return (
    <>
      <Figures>
        <Figure name="checkpoints" value={f.whole(counts.saved)} more={`${data.on_disk.length} in the run directory`} />
        <Figure name="training waited" value={f.duration(data.stall)} more="for all saves" />
        {counts.uploaded ? <Figure name="uploads" value={f.whole(counts.uploaded)} /> : null}
        {counts.exported ? <Figure name="exports" value={f.whole(counts.exported)} /> : null}
        <Figure name="failed" value={f.whole(bad)} tone={bad ? "bad" : undefined} />
        {copies.count > 0 && <Figure name="copies in host memory" value={f.whole(copies.count)} more={`the last of step ${f.whole(copies.last!.step)}, ${f.size(copies.last!.bytes)}, ${copies.last!.peer ? "on a second node, too" : "on one node"}`} />}
      </Figures>
      <div class="charts">
        {data.curve.x.length > 0 && <Chart title="time of a save" x={data.curve.x} lines={[{ label: "until complete", values: data.curve.y.seconds! }, { label: "training waited", values: data.curve.y.stall!, color: runColor(1) }]} format={f.short} />}
        {data.curve.x.length > 0 && <Chart title="write throughput" x={data.curve.x} lines={[{ label: "throughput", values: data.curve.y.bytes_per_second! }]} format={f.rate} />}
        {copies.count > 1 && <Chart title="time of a copy in host memory" x={data.copy_curve.x} lines={[{ label: "until complete", values: data.copy_curve.y.seconds!.mean }, { label: "training waited", values: data.copy_curve.y.stall!.mean, color: runColor(1) }]} format={f.short} />}
      </div>
      {data.saves.length > 0 && <section class="card"><h2>saves, the newest first</h2>
        <Table label="saves" numbers={[2, 3, 4, 5]} head={["time", "", "step", "size", "took", "waited", "where"]} rows={data.saves.slice(0, 200).map(row => [<time>{f.moment(row.time)}</time>, <span class={/failed|damaged/.test(row.kind) ? "bad" : undefined}>{row.kind.replaceAll("_", " ")}</span>, f.whole(row.step), row.bytes === undefined ? "" : f.size(row.bytes), row.seconds === undefined ? "" : f.short(row.seconds), row.stall === undefined ? "" : f.short(row.stall), row.reason ? `${tail(row.path ?? row.url)} ${row.reason}` : <>{tail(row.path ?? row.url)}{data.on_disk.includes(tail(row.path)) && row.kind === "saved" ? " (on disk)" : ""}</>])} />
      </section>}
    </>
  );
}

export interface Data { header: Header; data: Record<string, number>; tokens: number; samples: N; epochs: N; tokens_per_parameter: N; sources: Record<string, { x: number[]; loss: N[] }>; settings: Record<string, string>; changes: Note[]; }

export function DataView({ data }: { data: Data }) {
  const names = Object.keys(data.sources), total = data.data.run_tokens ?? 0;
  return (
    <>
      <Figures>
        <Figure name="documents" value={f.whole(data.data.documents)} />
        <Figure name="tokens of an epoch" value={f.count(data.data.tokens)} />
        <Figure name="trained tokens" value={f.count(data.tokens)} more={total ? `${f.percent(data.tokens / total)} of ${f.count(total)}` : undefined} />
        <Figure name="epochs" value={data.epochs === null ? f.UNKNOWN : data.epochs.toPrecision(3)} />
        <Figure name="position" value={f.whole(data.samples)} more="sequences read" />
        <Figure name="tokens per parameter" value={data.tokens_per_parameter === null ? f.UNKNOWN : data.tokens_per_parameter.toPrecision(3)} />
      </Figures>
      {total > 0 && <p class="bar" role="img" aria-label={`${f.percent(data.tokens / total)} of the run's tokens`}><i style={{ width: `${Math.min(100, 100 * data.tokens / total)}%` }} /></p>}
      <div class="charts">
        {names.length > 0 && <div class="wide"><Chart title="held-out loss by source" x={[]} lines={names.slice(0, 8).map((name, index) => ({ label: name, color: runColor(index), values: data.sources[name]!.loss, x: data.sources[name]!.x }))} format={f.loss} value="" /></div>}
        {names.length > 0 && <section class="card"><h2>sources</h2><Table label="sources" numbers={[1, 2]} head={["source", "first held-out loss", "last"]} rows={names.map(name => [name, f.loss(data.sources[name]!.loss[0]), f.loss(data.sources[name]!.loss.at(-1))])} /></section>}
        <section class="card"><h2>[data] of the run file</h2><Table label="data settings" head={["key", "value"]} rows={Object.entries(data.settings).map(([key, value]) => [<code>{key}</code>, value])} /></section>
        {data.changes.length > 0 && <section class="card"><h2>changes</h2><ul class="plain">{data.changes.map((note, index) => <li key={index}><time>{f.moment(note.time)}</time> {note.text}</li>)}</ul></section>}
      </div>
    </>
  );
}

export interface Samples { header: Header; samples: { prompt: string; text: string; step: number; tokens: number; seconds: N; time: N }[]; total: number; }

export function SamplesView({ data }: { data: Samples }) {
  const [prompt, setPrompt] = useState<string | null>(null), prompts = [...new Set(data.samples.map(sample => sample.prompt))], shown = data.samples.filter(sample => prompt === null || sample.prompt === prompt);
  if (!data.samples.length) return <Nothing>No samples: `train.sample_every` and `train.sample_prompts` ask for them.</Nothing>;
  return (
    <>
      <p class="tools-row"><label>prompt <select value={prompt === null ? "" : String(prompts.indexOf(prompt))} onChange={event => setPrompt(event.currentTarget.selectedIndex ? prompts[event.currentTarget.selectedIndex - 1]! : null)}><option value="">all</option>{prompts.map((each, index) => <option key={index} value={String(index)}>{each.slice(0, 60) || "(beginning of a document)"}</option>)}</select></label> <span class="muted">{shown.length} of {data.total}</span></p>
      <div class="samples">{shown.slice(0, 100).map((sample, index) => <article class="card" key={index}><h2>step {f.whole(sample.step)}</h2><p class="muted">{sample.tokens} tokens in {f.short(sample.seconds)}</p><pre tabIndex={0}><b>{sample.prompt}</b>{sample.text}</pre></article>)}</div>
    </>
  );
}
