// Building the page from text. Everything that comes from the server goes through text nodes or attributes, never markup.

/** An element. Properties named on… are listeners; false, null and undefined are left out (but aria-…: false is kept). */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || (value === false && !key.startsWith("aria-"))) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true && !key.startsWith("aria-") ? "" : String(value));
  }
  node.append(...present(children));
  return node;
}

/** The same in SVG. */
export function svg(tag, properties = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(properties)) node.setAttribute(key, String(value));
  node.append(...present(children));
  return node;
}

function present(children) {
  return children.flat().filter((child) => child !== null && child !== undefined && child !== false);
}

const ICONS = {
  overview: "M4 4h6v6H4zM14 4h6v6h-6zM4 14h6v6H4zM14 14h6v6h-6z",
  map: "M6 8a2 2 0 1 0 .01 0M15 5a2 2 0 1 0 .01 0M17 14a2 2 0 1 0 .01 0M8 16a2 2 0 1 0 .01 0M12 10a1 1 0 1 0 .01 0",
  similar: "M10.5 4a6.5 6.5 0 1 0 .01 0M15.5 15.5 20 20M8 10.5h5M10.5 8v5",
  oddities: "M12 4 2.8 20h18.4zM12 10v5M12 17.4v.2",
  training: "M4 4v16h16M7 15l4-5 3 3 5-7",
  edits: "M5 6h14M5 12h14M5 18h8",
  undo: "M9 14 4 9l5-5M4 9h10a6 6 0 0 1 0 12h-3",
  redo: "m15 14 5-5-5-5M20 9H10a6 6 0 0 0 0 12h3",
  sun: "M12 8a4 4 0 1 0 .01 0M12 2v2M12 20v2M2 12h2M20 12h2M4.9 4.9l1.4 1.4M17.7 17.7l1.4 1.4M4.9 19.1l1.4-1.4M17.7 6.3l1.4-1.4",
  moon: "M20 14.5A8 8 0 0 1 9.5 4 8 8 0 1 0 20 14.5z",
  auto: "M12 3a9 9 0 1 0 .01 0M12 3v18M12 7h6.6M12 12h9M12 17h6.6",
  help: "M9 9a3 3 0 1 1 4.2 2.8c-.8.4-1.2 1-1.2 2.2M12 17.4v.2M12 3a9 9 0 1 0 .01 0",
  check: "m5 12.5 4.5 4.5L19 7.5",
  back: "M14 5l-7 7 7 7",
  next: "M10 5l7 7-7 7",
  close: "M6 6l12 12M18 6 6 18",
  open: "M4 10V4h6M20 14v6h-6M4 4l7 7M20 20l-7-7",
  merge: "M6 4v4c0 4 6 4 6 8v4M18 4v4c0 4-6 4-6 8M9 17l3 3 3-3",
  lasso: "M12 5c5 0 8 2 8 5s-3 5-8 5c-4 0-8-2-8-5s3-5 8-5M7.5 14.5c-1.500 1-1.500 3 0 3s2 1.500 1 3.500",
  hand: "M12 3v18M3 12h18M12 3 9.500 5.500M12 3l2.500 2.500M12 21l-2.500-2.500M12 21l2.500-2.500M3 12l2.500-2.500M3 12l2.500 2.500M21 12l-2.500-2.500M21 12l-2.500 2.500",
  fit: "M4 9V4h5M20 9V4h-5M4 15v5h5M20 15v5h-5",
  plus: "M12 5v14M5 12h14",
  minus: "M5 12h14",
  file: "M12 16V5M8 9l4-4 4 4M4 15v5h16v-5",
};

export function icon(name) {
  const drawing = svg("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" });
  drawing.append(svg("path", { d: ICONS[name] }));
  return drawing;
}

/** A button with an icon, words, or both; without words `label` is what is read out and shown on hover. */
export function button(properties, ...children) {
  const { icon: name, label, ...rest } = properties;
  const described = label ? { "aria-label": label, title: label } : {};
  return el("button", { type: "button", ...described, ...rest }, name && icon(name), ...children);
}

const NUMBERS = new Intl.NumberFormat("en");

export function number(value) {
  return NUMBERS.format(value);
}

export function images(count) {
  return count === 1 ? "1 image" : `${number(count)} images`;
}

/** A remark of the server as a sentence: capital at the start, full stop at the end. */
export function sentence(text) {
  const whole = text.trim();
  return whole.charAt(0).toUpperCase() + whole.slice(1) + (/[.!?…]$/.test(whole) ? "" : ".");
}

/** A value of a curve, short: 0.00123, 4.57, 12,345. */
export function short(value) {
  const size = Math.abs(value);
  if (!Number.isFinite(value)) return String(value);
  if (Number.isInteger(value) || size >= 10000) return number(Math.round(value));
  return size !== 0 && size < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

export function pixels({ width, height }) {
  return width ? `${number(width)} × ${number(height)} pixels` : "cannot be read";
}

export function share(value) {
  return value === null || value === undefined ? "unknown" : value.toFixed(2);
}

/** Address of a thumbnail; pictures load when they come near the screen. */
export function thumbnail(id, size, alt) {
  const picture = el("img", { alt, loading: "lazy", decoding: "async", fetchpriority: "low", draggable: "false" });
  if (size < 384) picture.srcset = `/thumb/${id}?size=${size}, /thumb/${id}?size=${size * 2} 2x`;
  picture.src = `/thumb/${id}?size=${size}`;
  return picture;
}
