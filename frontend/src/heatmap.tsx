// Rows over steps as colored cells: a readout, the keyboard, PNG and CSV. A click on a row chooses it.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { N } from "./api";
import { CardHead } from "./chart";
import { saveCanvas, saveCsv } from "./files";
import { type Formatter, whole } from "./format";
import { Ramp } from "./parts";
import { onTheme, ramp, theme } from "./theme";

export interface HeatMapProps {
  title: string; rows: string[]; rowName: string; edges: number[]; values: N[][]; format: Formatter; least: number; most: number; label: string;
  chosen?: number | null; onRow?: (row: number) => void; zoomed?: boolean; onZoom?: (low: number | null, high: number | null) => void; children?: ComponentChildren;
}
interface Cell { row: number; column: number; }
const SHADES = 96, BOTTOM = 22;

// Loads differ by factors: the scale is logarithmic, from an even load or, with a shift, from zero.
function fraction(value: number, least: number, most: number): number {
  const shift = least > 0 ? 0 : most / 20;
  return Math.log((Math.max(least, value) + shift) / (least + shift)) / Math.log((most + shift) / (least + shift));
}

/** Round steps for the axis, at most so many. */
function ticks(low: number, high: number, most: number): number[] {
  const rough = (high - low) / Math.max(1, most), unit = 10 ** Math.floor(Math.log10(Math.max(1, rough))), each = Math.max(1, [1, 2, 5, 10].map(factor => factor * unit).find(step => step >= rough) ?? 1);
  const first = Math.ceil(low / each);
  return Array.from({ length: Math.floor(high / each) - first + 1 }, (_, index) => (first + index) * each);
}

export function HeatMap(props: HeatMapProps) {
  const canvas = useRef<HTMLCanvasElement>(null), place = useRef<HTMLDivElement>(null), [width, setWidth] = useState(0), [colors, setColors] = useState(0), [cell, setCell] = useState<Cell | null>(null);
  useEffect(() => onTheme(() => setColors(value => value + 1)), []);
  useEffect(() => { const observer = new ResizeObserver(entries => setWidth(Math.floor(entries[0]!.contentRect.width))); observer.observe(place.current!); return () => observer.disconnect(); }, []);
  const { rows, edges, values } = props, columns = edges.length - 1, tall = Math.max(3, Math.min(18, Math.floor(420 / Math.max(1, rows.length)))), height = tall * rows.length + BOTTOM;
  const left = Math.min(110, 14 + 6.6 * Math.max(2, ...rows.map(row => row.length))), low = edges[0] ?? 0, high = edges[columns] ?? 1, scale = (width - left - 6) / Math.max(1e-9, high - low);
  const x = (step: number) => left + (step - low) * scale, at = (row: number, column: number) => values[row]?.[column] ?? null;
  const found = cell && cell.row < rows.length && cell.column < columns ? cell : null;

  useEffect(() => {
    const node = canvas.current, context = node?.getContext("2d");
    if (!node || !context || !width || columns < 1) return;
    const ratio = devicePixelRatio || 1, theme_ = theme(), shades = Array.from({ length: SHADES + 1 }, (_, index) => ramp(index / SHADES));
    node.width = width * ratio; node.height = height * ratio;
    context.scale(ratio, ratio);
    context.clearRect(0, 0, width, height);
    const gap = tall > 5 ? 1 : 0, edge = edges.map(step => Math.round(x(step) * ratio) / ratio);  // on pixels: no seams
    for (let row = 0; row < rows.length; row++) for (let column = 0; column < columns; column++) {
      const value = at(row, column);
      context.fillStyle = value === null ? theme_.grid : shades[Math.round(SHADES * Math.min(1, fraction(value, props.least, props.most)))]!;
      context.fillRect(edge[column]!, row * tall, edge[column + 1]! - edge[column]!, tall - gap);
    }
    context.fillStyle = theme_.muted; context.font = "11px system-ui, sans-serif"; context.textBaseline = "middle"; context.textAlign = "right";
    const every = Math.ceil(13 / tall);
    for (let row = 0; row < rows.length; row += every) context.fillText(rows[row]!, left - 6, Math.max(6, row * tall + tall / 2), left - 8);
    for (const step of ticks(low, high, (width - left) / 90)) {
      const text = whole(step), half = context.measureText(text).width / 2;
      context.textAlign = "center";
      context.fillText(text, Math.min(width - half - 1, Math.max(left + half, x(step))), height - BOTTOM / 2 + 2);
    }
  }, [values, edges, rows, width, colors, props.least, props.most]);

  function under(event: MouseEvent): Cell | null {
    const box = canvas.current!.getBoundingClientRect(), row = Math.floor((event.clientY - box.top) / tall), step = low + (event.clientX - box.left - left) / scale;
    const column = edges.findIndex((edge, index) => index > 0 && step <= edge) - 1;
    return row < 0 || row >= rows.length ? null : { row, column: step < low || column < 0 ? columns - 1 : column };
  }
  function key(event: KeyboardEvent) {
    const from = found ?? { row: props.chosen ?? 0, column: columns - 1 }, move = ({ ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -columns], End: [0, columns] } as Record<string, [number, number]>)[event.key];
    if ((event.key === "Enter" || event.key === " ") && props.onRow) props.onRow(from.row);
    else if (move) setCell(found || event.key === "Home" ? { row: Math.min(rows.length - 1, Math.max(0, from.row + move[0])), column: Math.min(columns - 1, Math.max(0, from.column + move[1])) } : from);
    else if (event.key === "-" && props.onZoom) props.onZoom(null, null);
    else if (event.key === "+" && props.onZoom) { const middle = edges[from.column]!, half = (high - low) / 4; props.onZoom(Math.max(low, middle - half), Math.min(high, middle + half)); }
    else return;
    event.preventDefault();
  }
  const outline = (row: number, from: number, to: number, color: string) => <i class="outline" style={{ left: `${x(from) - 1}px`, top: `${row * tall - 1}px`, width: `${Math.max(4, (to - from) * scale + 2)}px`, height: `${tall + 2}px`, borderColor: color }} />;
  const stretch = (column: number) => `steps ${whole(edges[column]! + 1)} to ${whole(edges[column + 1])}`;
  return (
    <section class="card">
      <CardHead title={props.title} onPng={() => saveCanvas(props.title, canvas.current!, width, height, devicePixelRatio || 1)}
        onCsv={() => saveCsv(props.title, { columns: [props.rowName, "from step", "to step", "load"], rows: rows.flatMap((name, row) => Array.from({ length: columns }, (_, column) => [name, edges[column]! + 1, edges[column + 1], at(row, column)])) })}>
        {props.zoomed && props.onZoom && <button type="button" onClick={() => props.onZoom!(null, null)}>whole range</button>}
      </CardHead>
      <div class="drawing grid" ref={place} tabIndex={0} role="group" aria-roledescription="heat map" aria-label={`${props.label}; arrow keys read values${props.onRow ? ", Enter chooses a row" : ""}`} onKeyDown={key} onBlur={() => setCell(null)}>
        <canvas ref={canvas} style={{ width: `${width}px`, height: `${height}px`, cursor: props.onRow ? "pointer" : "default" }} aria-hidden="true" onMouseMove={event => setCell(under(event))} onMouseLeave={() => setCell(null)} onClick={event => { const clicked = under(event); if (clicked) props.onRow?.(clicked.row); }} />
        {props.chosen !== null && props.chosen !== undefined && props.chosen < rows.length && outline(props.chosen, low, high, theme().limit)}
        {found && outline(found.row, edges[found.column]!, edges[found.column + 1]!, theme().ink)}
      </div>
      <p class="readout" aria-live="polite">{found ? `${props.rowName} ${rows[found.row]}, ${stretch(found.column)}: ${props.format(at(found.row, found.column))}` : ""}</p>
      <p class="legend"><span>{props.format(props.least)} <Ramp /> {props.format(props.most)}, logarithmic</span>{props.children}</p>
    </section>
  );
}
