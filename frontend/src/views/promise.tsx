import type { Header, N } from "../api";
import * as f from "../format";
import { Drawing, Nothing, Table } from "../parts";
import { theme } from "../theme";

interface Row { name: string; unit: string; planned: N; low: N; high: N; measured: N; measured_low: N; measured_high: N; count: number; projected?: boolean; }
interface Part { name: string; label: string; planned: N; measured: N; color: string; }
export interface Promise_ { header: Header; promised: boolean; rows: Row[]; parts: Part[]; memory: Part[]; timed: { step: number; rank: number; ranks: number } | null; machine: string | null; }

const range = (low: N, high: N, format: f.Formatter) => (low === null || high === null ? "" : `${format(low)} to ${format(high)}`);

export function PromiseView({ data }: { data: Promise_ }) {
  if (!data.promised) return <Nothing>The plan promises nothing for this run: the cost model does not know custom modules, custom schedules and programs of the user's own.</Nothing>;
  const rows = data.rows.filter(row => row.planned !== null || row.measured !== null), compared = rows.filter(row => row.planned && row.measured);
  return (
    <>
      <p class="muted">{data.machine ? `Planned for ${data.machine}. ` : ""}Measured: median of the last launch without its first two steps; whole run: at the present pace.</p>
      <div class="charts">
        <div class="wide">
          <Drawing title="measured, relative to the plan" label={compared.map(row => `${row.name}: ${f.times(row.measured! / row.planned!)} the plan`).join("; ")} height={() => 46 * compared.length + 40} draw={width => ratios(compared, width)} rows={() => ({ columns: ["figure", "unit", "planned", "P10", "P90", "measured", "measured P10", "measured P90"], rows: rows.map(row => [row.name, row.unit, row.planned, row.low, row.high, row.measured, row.measured_low, row.measured_high]) })}>
            <Table label="promise" numbers={[1, 3]} head={["", "planned", "P10–P90", "measured", "P10–P90"]} rows={rows.map(row => { const format = f.byUnit(row.unit), long: f.Formatter = row.unit === "s" && row.projected ? f.duration : format; return [row.name, long(row.planned), range(row.low, row.high, long), long(row.measured), range(row.measured_low, row.measured_high, long)]; })} />
          </Drawing>
        </div>
        <Pairs title="step time by part" measured={data.rows[0]!.measured} parts={data.parts} format={f.short} note={data.timed ? `Measured in step ${data.timed.step} on rank ${data.timed.rank}, which waited least of ${data.timed.ranks}; scaled to the median step.` : "No step has been timed yet: an early step of each launch is."} />
        <Pairs title="memory by component" measured={data.rows[3]!.measured} parts={data.memory} format={f.size} note="Planned: the rank that needs most. Measured: the rank that has most. The total is that of the process or device, which includes the driver." />
      </div>
    </>
  );
}

function ratios(rows: Row[], width: number) {
  const colors = theme(), left = Math.min(190, width * 0.36), right = 70, all = rows.flatMap(row => [row.measured!, row.measured_low, row.measured_high, row.low, row.high].filter((value): value is number => !!value && value > 0).map(value => value / row.planned!));
  const low = Math.min(0.5, ...all) / 1.08, high = Math.max(2, ...all) * 1.08, x = (ratio: number) => left + (width - left - right) * Math.log(ratio / low) / Math.log(high / low);
  const ticks: number[] = [];
  for (const tick of [1, 0.5, 2, 0.2, 5, 0.1, 10, 0.05, 20, 0.02, 50, 0.01, 100, 0.001, 1000]) if (tick > low && tick < high && ticks.every(other => Math.abs(x(other) - x(tick)) > 42)) ticks.push(tick);
  const bottom = 46 * rows.length + 10;
  return (
    <>
      {ticks.map(tick => <g key={tick}><line x1={x(tick)} x2={x(tick)} y1={0} y2={bottom} stroke={tick === 1 ? colors.ink : colors.grid} /><text x={x(tick)} y={bottom + 16} text-anchor="middle" fill={colors.muted}>{tick === 1 ? "plan" : `${tick} ×`}</text></g>)}
      {rows.map((row, index) => {
        const y = 46 * index + 26, ratio = row.measured! / row.planned!, inside = row.low && row.high ? row.measured! >= row.low && row.measured! <= row.high : Math.abs(Math.log(ratio)) < 0.1, color = inside ? colors.good : colors.limit;
        return (
          <g key={row.name}>
            <text x={0} y={y + 4} fill={colors.ink}>{width < 500 ? row.name.replace(" of the fullest rank", "").replace(" of the whole run", "") : row.name}</text>
            {row.low && row.high ? <rect x={x(row.low / row.planned!)} y={y - 9} width={Math.max(2, x(row.high / row.planned!) - x(row.low / row.planned!))} height={18} rx={4} fill={colors.good} fill-opacity={0.22} /> : null}
            {row.measured_low && row.measured_high ? <line x1={x(row.measured_low / row.planned!)} x2={x(row.measured_high / row.planned!)} y1={y} y2={y} stroke={color} stroke-width={2} /> : null}
            <circle cx={x(ratio)} cy={y} r={6} fill={color} stroke={colors.paper} stroke-width={1.5} />
            <text x={width} y={y + 4} text-anchor="end" fill={color} font-weight={600}>{f.times(ratio)}</text>
          </g>
        );
      })}
    </>
  );
}

function Pairs(props: { title: string; measured: N; parts: Part[]; format: f.Formatter; note: string }) {
  const { parts, format } = props, planned = parts.reduce((sum, part) => sum + (part.planned ?? 0), 0);
  if (!parts.length) return <section class="card"><h2>{props.title}</h2><p class="muted">{props.note}</p></section>;
  return (
    <Drawing title={props.title} value={`${format(planned)} planned, ${format(props.measured)} measured`} label={parts.map(part => `${part.label}: planned ${format(part.planned)}, measured ${format(part.measured)}`).join("; ")} height={() => 44 * parts.length + 8} rows={() => ({ columns: ["part", "planned", "measured"], rows: parts.map(part => [part.label, part.planned, part.measured]) })}
      draw={width => {
        const colors = theme(), most = Math.max(...parts.flatMap(part => [part.planned ?? 0, part.measured ?? 0])) || 1, room = width - 86;
        return parts.map((part, index) => {
          const y = 44 * index;
          return (
            <g key={part.name}>
              <text x={0} y={y + 12} fill={colors.ink}>{part.label}</text>
              <rect x={0} y={y + 17} width={Math.max(part.planned ? 1.5 : 0, room * (part.planned ?? 0) / most)} height={8} fill={part.color} fill-opacity={0.4} />
              <text x={room * (part.planned ?? 0) / most + 6} y={y + 25} fill={colors.muted} font-size={11}>{part.planned === null ? "not planned" : format(part.planned)}</text>
              <rect x={0} y={y + 28} width={Math.max(part.measured ? 1.5 : 0, room * (part.measured ?? 0) / most)} height={8} fill={part.color} />
              <text x={room * (part.measured ?? 0) / most + 6} y={y + 37} fill={colors.ink} font-size={11}>{part.measured === null ? "not measured" : format(part.measured)}</text>
            </g>
          );
        });
      }}>
      <p class="legend">Upper, pale bar: planned. Lower bar: measured. {props.note}</p>
    </Drawing>
  );
}
