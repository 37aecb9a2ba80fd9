// The state of the page is in its address, so that a link shows another person the same.
import { useEffect, useState } from "preact/hooks";

export interface Route { run: string | null; view: string; query: URLSearchParams; }

export function parse(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(part => part);
  const params = new URLSearchParams(query);
  if (parts[0] === "run" && parts[1]) {
    let name = "";
    try { name = decodeURIComponent(parts[1]); } catch { /* a broken link */ }
    return { run: name, view: parts[2] ?? "overview", query: params };
  }
  return { run: null, view: parts[0] === "compare" ? "compare" : "runs", query: params };
}

export function link(run: string | null, view: string, query?: Record<string, string | number | null | undefined> | URLSearchParams): string {
  const params = query instanceof URLSearchParams ? query : new URLSearchParams();
  if (query && !(query instanceof URLSearchParams)) for (const [key, value] of Object.entries(query)) if (value !== null && value !== undefined && value !== "") params.set(key, String(value));
  const path = run === null ? (view === "runs" ? "#/" : `#/${view}`) : `#/run/${encodeURIComponent(run)}/${view}`;
  const text = params.toString();
  return text ? `${path}?${text}` : path;
}

export function go(to: string, replace = false) {
  if (replace) { history.replaceState(null, "", to); dispatchEvent(new HashChangeEvent("hashchange")); } else location.hash = to;
}

// Changes fields of the query of this page; null removes one.
export function change(route: Route, fields: Record<string, string | number | null>) {
  const params = new URLSearchParams(route.query);
  for (const [key, value] of Object.entries(fields)) value === null ? params.delete(key) : params.set(key, String(value));
  go(link(route.run, route.view, params), true);
}

export type Range = readonly [number | null, number | null];

/** The part of the axis that the page shows; null: to its end. */
export function rangeOf(route: Route): Range {
  const end = (name: string) => { const text = route.query.get(name), value = Number(text); return text && Number.isFinite(value) ? value : null; };
  return [end("from"), end("to")];
}

export function useRoute(): Route {
  const [route, set] = useState(parse(location.hash));
  useEffect(() => {
    const changed = () => set(parse(location.hash));
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}
