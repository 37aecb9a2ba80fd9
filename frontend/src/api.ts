// Asks the server for views, again and again while somebody looks: every second while the run goes on, less often after its end.
import { useLayoutEffect, useRef, useState } from "preact/hooks";

export type N = number | null;
export interface Curve { x: number[]; rows: number; reduced: boolean; y: Record<string, { mean: N[]; min?: N[]; max?: N[] }>; }
export interface Header {
  name: string; state: string; reason: string | null; step: number; steps: number; elapsed: number; time_left: N; first_time: N; last_time: N;
  price: N; price_end: N; launches: number; failures: number; progress: number; ranks_known: boolean; unreadable: number; experts: boolean;
  ranks: N; device: string | null; parameters: N; adapters: N; compute: string | null; layout: Record<string, unknown> | null; version: string | null;
  micro_batch: N; accumulation: N; program: string[] | null;
}
export interface Note { kind: string; time: N; step: N; rank: N; node?: N; text: string; severe: boolean; id?: number; }
export interface RunLine { name: string; state: string; steps: N; step: number; loss: N; eval_loss: N; time: N; }

// Curves come as 32-bit floats in base64: several times as fast to write and to read as digits. Like `packed` in phalanx/watch/columns.py.
function floats(text: string): N[] {
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0)), view = new DataView(bytes.buffer);
  return Array.from({ length: bytes.length / 4 }, (_, index) => { const value = view.getFloat32(4 * index, true); return Number.isFinite(value) ? value : null; });
}

function unpack(answer: unknown): void {
  if (typeof answer !== "object" || answer === null) return;
  const { x, y } = answer as { x?: unknown; y?: Record<string, Record<string, unknown>> };
  if (Array.isArray(y)) return;
  if (Array.isArray(x) && typeof y === "object" && y !== null) {
    for (const line of Object.values(y)) for (const [name, values] of Object.entries(line)) if (typeof values === "string") line[name] = floats(values);
  } else for (const inner of Object.values(answer)) if (!Array.isArray(inner) || typeof inner[0] === "object") unpack(inner);
}

// What was answered lately: a view or a range that was seen is shown at once, and asked for again.
const KEPT = 12, kept = new Map<string, unknown>();
function keep(url: string, data: unknown) {
  kept.delete(url);
  kept.set(url, data);
  if (kept.size > KEPT) kept.delete(kept.keys().next().value!);
}

const FAST = 1000, SLOW = 5000;
let lastSkew = 0;
/** Seconds since 1970 by the server's clock, nearly. */
export const now = () => Date.now() / 1000 + lastSkew;

export class Answer<T> {
  constructor(readonly data: T | null, readonly error: string | null, readonly asked: string) {}
}

export function useApi<T>(url: string | null, isLive: (data: T) => boolean): Answer<T> {
  const [answer, set] = useState(new Answer<T>(null, null, ""));
  const data = useRef<T | null>(null);
  // Before the page is painted: the answer is on its way while the browser draws what it has.
  useLayoutEffect(() => {
    if (url === null) return;
    let timer = 0, ended = false, etag = "", controller = new AbortController();
    async function ask(address: string) {
      try {
        const response = await fetch(address, { headers: etag ? { "If-None-Match": etag } : {}, signal: controller.signal, cache: "no-store" });
        const date = response.headers.get("Date");
        const skew = date ? (Date.parse(date) - Date.now()) / 1000 : 0;
        lastSkew = Math.abs(skew) > 5 ? skew : 0;  // the header has whole seconds
        if (ended) return;
        if (response.status === 200) {
          etag = response.headers.get("ETag") ?? "";
          const found = await response.json() as T;
          unpack(found);
          keep(address, found);
          if (ended) return;
          data.current = found;
          set(new Answer(data.current, null, address));
        } else if (response.status === 304) set(before => before.error ? new Answer(data.current, null, address) : before);
        else set(new Answer(data.current, (await response.text()).trim() || `The server answers ${response.status}.`, address));
      } catch (error) {
        if (ended) return;
        etag = "";
        set(new Answer(data.current, "The server does not answer; asking again.", address));
      }
      if (!ended) timer = window.setTimeout(() => again(address), data.current === null || isLive(data.current) ? FAST : SLOW);
    }
    function again(address: string) { if (!document.hidden) void ask(address); }
    function shown() { if (!document.hidden) { clearTimeout(timer); void ask(url!); } }
    document.addEventListener("visibilitychange", shown);
    const seen = kept.get(url) as T | undefined;
    if (seen) { data.current = seen; set(new Answer(seen, null, url)); }
    void ask(url);
    return () => { ended = true; controller.abort(); clearTimeout(timer); document.removeEventListener("visibilitychange", shown); };
  }, [url]);
  return answer;
}

export const viewUrl = (run: string, view: string, fields: Record<string, string | number | null | undefined> = {}) => {
  const params = new URLSearchParams({ run, view, pack: "1" });
  for (const [key, value] of Object.entries(fields)) if (value !== null && value !== undefined && value !== "") params.set(key, String(value));
  return `api/view?${params}`;
};

/** Points of a chart, two pixels each. Each is a range, so that nothing between them is lost. */
export const chartWidth = () => Math.min(800, Math.max(200, Math.ceil(innerWidth / 200) * 100));
