// Colors of the charts, read from the style sheet, and the choice of light or dark.
export interface Theme { ink: string; muted: string; grid: string; best: string; limit: string; paper: string; shade: string; good: string; warn: string; second: string; }

const names: (keyof Theme)[] = ["ink", "muted", "grid", "best", "limit", "paper", "shade", "good", "warn", "second"];

let known: Theme | null = null;

export function theme(): Theme {
  if (!known) {
    const style = getComputedStyle(document.documentElement);
    known = Object.fromEntries(names.map(name => [name, style.getPropertyValue(`--${name}`).trim()])) as unknown as Theme;
  }
  return known;
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set<() => void>();
const stored = (): string | null => { try { return localStorage.getItem("phalanx-theme"); } catch { return null; } };

export const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";

export function setTheme(name: "light" | "dark" | null) {
  if (name) document.documentElement.dataset.theme = name; else delete document.documentElement.dataset.theme;
  try { name ? localStorage.setItem("phalanx-theme", name) : localStorage.removeItem("phalanx-theme"); } catch { /* private window */ }
  changed();
}

function changed() {
  known = null;
  listeners.forEach(listener => listener());
}

export function onTheme(listener: () => void): () => void {
  listeners.add(listener);
  return () => { listeners.delete(listener); };
}

const first = stored();
if (first === "light" || first === "dark") document.documentElement.dataset.theme = first;
dark.addEventListener("change", changed);

// Curves of several runs: Okabe and Ito's colors, which color-blind readers can tell apart.
const RUNS = {
  light: ["#0072b2", "#d55e00", "#009e73", "#b5488a", "#b97800", "#3a8fc7", "#8a6d3b", "#5f6c7b"],
  dark: ["#56b4e9", "#ff9f5a", "#3fd0a0", "#f0a8d0", "#f0c050", "#a9d8ff", "#d0b088", "#a3aebb"],
};
export const runColor = (index: number) => RUNS[isDark() ? "dark" : "light"][index % 8]!;

// From few to much, readable on both backgrounds.
const RAMP: Record<string, [number, number, number][]> = {
  light: [[224, 234, 245], [158, 202, 225], [66, 146, 198], [8, 81, 156], [8, 38, 84]],
  dark: [[38, 52, 70], [33, 92, 140], [52, 138, 189], [130, 196, 232], [232, 245, 255]],
};

export function ramp(fraction: number): string {
  const stops = RAMP[isDark() ? "dark" : "light"]!;
  const at = Math.min(1, Math.max(0, fraction)) * (stops.length - 1), low = Math.min(stops.length - 2, Math.floor(at)), part = at - low;
  const channel = (index: number) => Math.round(stops[low]![index]! * (1 - part) + stops[low + 1]![index]! * part);
  return `rgb(${channel(0)},${channel(1)},${channel(2)})`;
}
