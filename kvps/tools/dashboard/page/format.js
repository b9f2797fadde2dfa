// Numbers as people read them: durations, bytes, rates and shares. A value that is not known is a dash.

const DASH = "–";

function digits(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function seconds(value) {
  if (value === null || value === undefined) return DASH;
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${digits(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (value < 86400) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} d ${Math.floor((value % 86400) / 3600)} h`;
}

export function bytes(value) {
  if (value === null || value === undefined) return DASH;
  let unit = "B";
  for (const next of ["KiB", "MiB", "GiB", "TiB"]) {
    if (value < 1024) break;
    [value, unit] = [value / 1024, next];
  }
  return unit === "B" ? `${value.toFixed(0)} B` : `${digits(value)} ${unit}`;
}

export const bytesRate = (value) => (value === null || value === undefined ? DASH : `${bytes(value)}/s`);

export const rate = (value) => (value === null || value === undefined ? DASH : `${digits(value)}/s`);

export const share = (value) =>
  value === null || value === undefined ? DASH : `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`;

export const ratio = (value) => (value === null || value === undefined ? DASH : `${digits(value)}×`);

export const count = (value) =>
  value === null || value === undefined ? DASH : Math.round(value).toLocaleString("en");

export const text = (value) => (value === null || value === undefined || value === "" ? DASH : String(value));
