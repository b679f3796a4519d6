// Curves as SVG: axes with round numbers, and the value under the pointer.

import { el, short, svg } from "./dom.js";

const WIDTH = 440;
const HEIGHT = 190;
const LEFT = 50;
const RIGHT = 14;
const TOP = 10;
const BOTTOM = 26;

/** A small curve without axes; `words` is what is read out. */
export function sparkline(points, words) {
  const drawing = svg("svg", { viewBox: "0 0 140 36", class: "sparkline", role: "img", "aria-label": words });
  const across = scale(points.map(([step]) => step), 2, 138);
  const up = scale(points.map(([, size]) => size), 33, 3);
  drawing.append(svg("path", { d: path(points, across, up) }));
  const [step, size] = points[points.length - 1];
  drawing.append(svg("circle", { cx: across(step), cy: up(size), r: 2.5 }));
  return drawing;
}

/** One curve: points are [step, value]. */
export function chart(title, points) {
  return draw(title, points, [{ class: "line", values: points }], ([, value]) => short(value));
}

/** Sizes over time: points are [step, smallest, q25, median, q75, largest]. */
export function sizesChart(title, points) {
  const column = (at) => points.map((point) => [point[0], point[at]]);
  const parts = [
    { class: "band faint", values: column(1), upper: column(5) },
    { class: "band", values: column(2), upper: column(4) },
    { class: "line", values: column(3) },
  ];
  const words = ([, smallest, low, median, high, largest]) =>
    `${short(smallest)} to ${short(largest)}, half within ${short(low)} – ${short(high)}, median ${short(median)}`;
  return draw(title, points, parts, words);
}

function draw(title, points, parts, words) {
  const finite = parts.flatMap((part) => [...part.values, ...(part.upper ?? [])]).filter(([, value]) => Number.isFinite(value));
  const across = scale(points.map(([step]) => step), LEFT, WIDTH - RIGHT);
  const values = finite.map(([, value]) => value);
  const marks = ticks(Math.min(...values), Math.max(...values), 4);
  const up = scale([...marks, ...values], HEIGHT - BOTTOM, TOP);
  const [first, last] = [points[0], points[points.length - 1]];
  const label = `${title}: ${words(first)} at step ${short(first[0])}, ${words(last)} at step ${short(last[0])}`;
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  for (const mark of marks) {
    drawing.append(svg("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: up(mark), y2: up(mark) }));
    drawing.append(svg("text", { x: LEFT - 8, y: up(mark) + 4, "text-anchor": "end" }, short(mark)));
  }
  const steps = ticks(first[0], last[0], 5).filter((step) => step >= first[0] && step <= last[0]);
  for (const step of steps) {
    const anchor = across(step) > WIDTH - RIGHT - 20 ? "end" : "middle";
    drawing.append(svg("text", { x: across(step), y: HEIGHT - 6, "text-anchor": anchor }, short(step)));
  }
  for (const part of parts) {
    const outline = path(part.values, across, up);
    const back = part.upper ? ` L${path([...part.upper].reverse(), across, up).slice(1)} Z` : "";
    drawing.append(svg("path", { class: part.class, d: outline + back }));
  }
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  drawing.append(cursor);
  const reading = el("span", { class: "reading" }, words(last));

  function point(event) {
    const box = drawing.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    let best = last;
    for (const candidate of points) if (Math.abs(across(candidate[0]) - x) < Math.abs(across(best[0]) - x)) best = candidate;
    cursor.setAttribute("x1", across(best[0]));
    cursor.setAttribute("x2", across(best[0]));
    cursor.setAttribute("visibility", "visible");
    reading.textContent = `step ${short(best[0])}: ${words(best)}`;
  }
  drawing.addEventListener("pointermove", point);
  drawing.addEventListener("pointerdown", point);
  drawing.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    reading.textContent = words(last);
  });
  return el("figure", { class: "chart" }, el("figcaption", {}, el("span", { class: "chart-title" }, title), reading), drawing);
}

function scale(values, from, to) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (!(high > low)) return () => (from + to) / 2;
  const span = high - low;
  return (value) => Number((from + ((value - low) / span) * (to - from)).toFixed(1));
}

/** The line through the points; a value that is not a number breaks it. */
function path(points, across, up) {
  let broken = true;
  let text = "";
  for (const [step, value] of points) {
    if (!Number.isFinite(value)) {
      broken = true;
      continue;
    }
    text += `${broken ? "M" : "L"}${across(step)} ${up(value)}`;
    broken = false;
  }
  return text;
}

/** About `count` round numbers that span low to high. */
function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const marks = [];
  for (let i = Math.floor(low / step); i <= Math.ceil(high / step); i++) marks.push(Number((i * step).toPrecision(12)));
  return marks;
}
