// Numbers for people, as phalanx/dashboard/numbers.py writes them. An unknown value is a dash.
export type Num = number | null | undefined;
export type Formatter = (value: Num) => string;
export const UNKNOWN = "–";

const isFinite_ = (value: Num): value is number => typeof value === "number" && Number.isFinite(value);
const decimals = (value: number) => (Math.abs(value) < 9.995 ? 2 : Math.abs(value) < 99.95 ? 1 : 0);

function scaled(value: Num, letters: string, sign = "", unit = ""): string {
  if (!isFinite_(value)) return UNKNOWN;
  let letter = "";
  for (const larger of letters) {
    if (Math.abs(Number(value.toPrecision(3))) < 1000) break;
    value /= 1000;
    letter = larger;
  }
  const digits = !letter && Number.isInteger(value) ? 0 : decimals(value);
  return `${sign}${value.toFixed(digits)}${unit ? " " : ""}${letter}${unit}`;
}

export const count: Formatter = value => scaled(value, "kMBT");
export const dollars: Formatter = value => scaled(value, "kMBT", "$");
export const whole: Formatter = value => (isFinite_(value) ? Math.round(value).toLocaleString("en-US") : UNKNOWN);
export const percent: Formatter = value => (isFinite_(value) ? `${(100 * value).toFixed(Math.abs(value) >= 0.1 ? 1 : 2)}%` : UNKNOWN);
export const times: Formatter = value => (isFinite_(value) ? `${value.toFixed(2)} ×` : UNKNOWN);

export const size: Formatter = value => {
  if (!isFinite_(value)) return UNKNOWN;
  let unit = 0;
  while (unit < 5 && Math.abs(value) >= 1023.95) { value /= 1024; unit += 1; }
  return unit === 0 ? `${value.toFixed(0)} B` : `${value.toFixed(1)} ${"KMGTP"[unit - 1]}iB`;
};

export const rate: Formatter = value => (isFinite_(value) ? `${size(value)}/s` : UNKNOWN);

export const duration: Formatter = value => {
  if (!isFinite_(value)) return UNKNOWN;
  value = Math.max(0, value);
  const two = (part: number) => String(part).padStart(2, "0");
  if (value < 9.95) return `${value.toFixed(1)} s`;
  const seconds = Math.round(value);
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${two(seconds % 60)} s`;
  const minutes = Math.round(value / 60);
  if (minutes < 24 * 60) return `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
  const hours = Math.round(value / 3600);
  return `${Math.floor(hours / 24)} d ${two(hours % 24)} h`;
};

export const short: Formatter = value => {
  if (!isFinite_(value)) return UNKNOWN;
  if (value >= 600) return duration(value);
  if (value === 0) return "0 s";
  const [scale, unit] = Math.abs(value) >= 0.9995 ? [1, "s"] : Math.abs(value) * 1e3 >= 0.9995 ? [1e3, "ms"] : [1e6, "µs"];
  return `${(value * (scale as number)).toFixed(decimals(value * (scale as number)))} ${unit}`;
};

export const loss: Formatter = value => (isFinite_(value) ? (Math.abs(value) < 1e4 ? value.toFixed(4) : value.toPrecision(3)) : UNKNOWN);
export const small: Formatter = value => {
  if (!isFinite_(value)) return UNKNOWN;
  if (value === 0) return "0";
  return Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5 ? value.toExponential(2) : String(Number(value.toPrecision(3)));
};

export const clock: Formatter = value => (isFinite_(value) ? new Date(value * 1000).toLocaleTimeString("en-US", { hour12: false }) : UNKNOWN);
export const moment: Formatter = value => (isFinite_(value)
  ? new Date(value * 1000).toLocaleString("en-US", { hour12: false, month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit" }) : UNKNOWN);

export const byUnit = (unit: string): Formatter => ({ s: short, B: size, count, fraction: percent, $: dollars } as Record<string, Formatter>)[unit] ?? small;
