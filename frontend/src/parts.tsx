// Small parts that several views use.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { CardHead } from "./chart";
import { type Rows, saveCsv, saveSvg } from "./files";
import { onTheme, ramp } from "./theme";

export function Figure(props: { name: string; value: string; more?: string; tone?: "bad" | "good" }) {
  return <div class="figure"><dt>{props.name}</dt><dd class={props.tone}>{props.value}</dd>{props.more && <dd class="more">{props.more}</dd>}</div>;
}

export function Figures(props: { children: ComponentChildren }) { return <dl class="figures">{props.children}</dl>; }

export function Nothing(props: { children: ComponentChildren }) { return <p class="nothing">{props.children}</p>; }

/** A card with a drawing that is as wide as the card, in the colors of the theme. */
export function Drawing(props: { title: string; value?: string; height: (width: number) => number; draw: (width: number) => ComponentChildren; rows: () => Rows; label: string; children?: ComponentChildren }) {
  const place = useRef<HTMLDivElement>(null), svg = useRef<SVGSVGElement>(null), [width, setWidth] = useState(0), [, redraw] = useState(0);
  useEffect(() => onTheme(() => redraw(value => value + 1)), []);
  useEffect(() => {
    const observer = new ResizeObserver(entries => setWidth(Math.floor(entries[0]!.contentRect.width)));
    observer.observe(place.current!);
    return () => observer.disconnect();
  }, []);
  return (
    <section class="card">
      <CardHead title={props.title} value={props.value} onPng={() => svg.current && saveSvg(props.title, svg.current)} onCsv={() => saveCsv(props.title, props.rows())} />
      <div class="drawing" ref={place}>
        {width > 0 && <svg ref={svg} role="img" aria-label={props.label} width={width} height={props.height(width)} viewBox={`0 0 ${width} ${props.height(width)}`} font-size="12">{props.draw(width)}</svg>}
      </div>
      {props.children}
    </section>
  );
}

export function Table(props: { head: ComponentChildren[]; rows: ComponentChildren[][]; label: string; numbers?: number[] }) {
  const side = (index: number, cell?: ComponentChildren) => (props.numbers?.includes(index) ? "number" : typeof cell === "string" && cell.length > 40 ? "long" : undefined);
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={props.label}>
      <table>
        <thead><tr>{props.head.map((cell, index) => <th key={index} scope="col" class={side(index)}>{cell}</th>)}</tr></thead>
        <tbody>{props.rows.map((row, at) => <tr key={at}>{row.map((cell, index) => <td key={index} class={side(index, cell)}>{cell}</td>)}</tr>)}</tbody>
      </table>
    </div>
  );
}

export function State(props: { state: string }) { return <span class={`state ${props.state}`}>{props.state}</span>; }

/** The colors of a scale, from few to much. */
export function Ramp() { return <span class="ramp" aria-hidden="true">{[0, 0.2, 0.4, 0.6, 0.8, 1].map(part => <i key={part} style={{ background: ramp(part) }} />)}</span>; }
