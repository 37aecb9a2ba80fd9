import { type Curve, type Header, type N, useApi, viewUrl } from "../api";
import { Chart } from "../chart";
import * as f from "../format";
import { HeatMap } from "../heatmap";
import { Figure, Figures, Nothing, Table } from "../parts";
import { change, link, type Route } from "../route";
import { zoomOf } from "./overview";

interface Last { fullest: number; most: number; emptiest: number; least: number; unused: number; experts: number; }
interface Layers { names: string[]; edges: number[]; load: N[][]; last: Last[]; step: N; steps?: number; }
export interface Experts { header: Header; curve: Curve; layers: Layers; }

const greatest = (rows: N[][]) => rows.reduce((most, row) => row.reduce<number>((high, value) => Math.max(high, value ?? 0), most), 0);

export function ExpertsView({ data, route }: { data: Experts; route: Route }) {
  const line = data.curve.y.expert_load, { layers } = data, zoom = zoomOf(route);
  if (!line?.mean.some(value => value !== null) && !layers.names.length) return <Nothing>The model has no experts, or none has been counted yet.</Nothing>;
  const worst = layers.last.map((last, layer) => ({ ...last, layer })).sort((a, b) => b.most - a.most), asked = Number(route.query.get("layer") ?? worst[0]?.layer ?? 0);
  const chosen = Number.isInteger(asked) && asked >= 0 && asked < layers.names.length ? asked : 0, choose = (layer: number) => change(route, { layer });
  const sizes = layers.last.map(last => last.experts), few = Math.min(...sizes), many = Math.max(...sizes);
  const unused = layers.last.reduce((sum, last) => sum + last.unused, 0);
  return (
    <>
      {worst[0] && <Figures>
        <Figure name="fullest expert" value={f.times(worst[0].most)} more={`of the mean: expert ${worst[0].fullest} of ${layers.names[worst[0].layer]}`} />
        <Figure name="emptiest expert" value={f.times(Math.min(...worst.map(row => row.least)))} more="of the mean" />
        <Figure name="experts without a token" value={f.whole(unused)} more={`in steps ${f.whole(layers.step! - layers.steps! + 1)} to ${f.whole(layers.step)}`} tone={unused ? "bad" : undefined} />
        <Figure name="layers with experts" value={f.whole(layers.names.length)} more={few === many ? `${f.whole(few)} experts each` : `${f.whole(few)} to ${f.whole(many)} experts each`} />
      </Figures>}
      <div class="charts">
        {line?.mean.some(value => value !== null) && <div class="wide"><Chart title="load of the fullest expert" x={data.curve.x} group="steps" lines={[{ label: "load", values: line.mean, low: line.min, high: line.max }]} format={f.times} {...zoom} band={{ low: 1, high: 1, middle: 1, label: "even load" }} hint="of the mean, in the worst layer, over the last 20 steps" /></div>}
        {layers.names.length ? <>
          <div class="wide"><HeatMap title="load of the fullest expert by layer" rows={layers.names} rowName="layer" edges={layers.edges} values={layers.load} format={f.times} least={1} most={Math.max(1.5, greatest(layers.load))} chosen={chosen} onRow={choose} {...zoom} label={`${layers.names.length} layers over steps, colored by the load of their fullest expert divided by the mean; worst now: ${worst.slice(0, 3).map(row => `${layers.names[row.layer]} ${f.times(row.most)}`).join(", ")}`}><span>1 × is an even load</span><span>click a layer for its experts</span></HeatMap></div>
          <div class="wide"><Layer run={route.run!} layer={chosen} name={layers.names[chosen]!} route={route} /></div>
          <section class="card wide"><h2>worst layers</h2>
            <Table label="worst layers" numbers={[1, 2, 3, 4, 5, 6]} head={["layer", "fullest expert", "its load", "greatest of the range", "emptiest expert", "its load", "without a token"]} rows={worst.slice(0, 10).map(row => [<a href={link(route.run, "experts", withLayer(route, row.layer))}>{layers.names[row.layer]}</a>, row.fullest, f.times(row.most), f.times(greatest([layers.load[row.layer]!])), row.emptiest, f.times(row.least), row.unused])} />
          </section>
        </> : <p class="muted wide">Loads of single layers are recorded every 20 steps; runs of earlier versions have none.</p>}
      </div>
    </>
  );
}

function withLayer(route: Route, layer: number): URLSearchParams {
  const params = new URLSearchParams(route.query);
  params.set("layer", String(layer));
  return params;
}

function Layer({ run, layer, name, route }: { run: string; layer: number; name: string; route: Route }) {
  const { data } = useApi<{ header: Header; layer: number; edges: number[]; load: N[][] }>(viewUrl(run, "expert_layer", { layer, from: route.query.get("from"), to: route.query.get("to") }), answer => answer.header.state === "running" || answer.header.progress < 1);
  if (!data || data.layer !== layer) return <section class="card"><h2>experts of {name}</h2><p class="muted">loading</p></section>;
  return <HeatMap title={`experts of ${name}`} rows={data.load.map((_, expert) => String(expert))} rowName="expert" edges={data.edges} values={data.load} format={f.times} least={0} most={Math.max(2, greatest(data.load))} {...zoomOf(route)} label={`${data.load.length} experts of ${name} over steps, colored by their load divided by the mean`}><span>tokens divided by the mean of the layer</span></HeatMap>;
}
