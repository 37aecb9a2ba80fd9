// Saves charts: PNG of what is drawn, CSV of its numbers.
import { theme } from "./theme";

function save(blob: Blob, name: string) {
  const anchor = document.createElement("a");
  anchor.href = URL.createObjectURL(blob);
  anchor.download = name;
  anchor.hidden = true;
  document.body.append(anchor);
  anchor.click();
  anchor.remove();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 10_000);
}

const fileName = (title: string, ending: string) => `${title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "") || "chart"}.${ending}`;

/** Text that spreadsheets do not take for a formula. */
function cell(value: unknown): string {
  if (value === null || value === undefined) return "";
  const text = String(value), safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

export type Rows = { columns: string[]; rows: unknown[][] };

export function saveCsv(title: string, { columns, rows }: Rows) {
  const text = [columns, ...rows].map(row => row.map(cell).join(",")).join("\r\n") + "\r\n";
  save(new Blob([text], { type: "text/csv" }), fileName(title, "csv"));
}

export function saveCanvas(title: string, picture: HTMLCanvasElement | HTMLImageElement, width: number, height: number, scale: number) {
  const colors = theme(), top = 30, canvas = document.createElement("canvas");
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round((height + top) * scale);
  const context = canvas.getContext("2d")!;
  context.fillStyle = colors.paper;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = colors.ink;
  context.font = `600 ${14 * scale}px system-ui, sans-serif`;
  context.fillText(title, 10 * scale, 20 * scale);
  context.drawImage(picture, 0, top * scale, width * scale, height * scale);
  canvas.toBlob(blob => { if (blob) save(blob, fileName(title, "png")); }, "image/png");
}

export function saveSvg(title: string, svg: SVGSVGElement) {
  const box = svg.getBoundingClientRect(), copy = svg.cloneNode(true) as SVGSVGElement, image = new Image();
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", String(box.width));
  copy.setAttribute("height", String(box.height));
  copy.setAttribute("font-family", "system-ui, sans-serif");
  image.onload = () => saveCanvas(title, image, box.width, box.height, 2);
  image.src = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" }));
}
