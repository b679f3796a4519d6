// Drawing and asking a cloud of up to some hundred thousand points, with typed arrays only: no library, no GPU needed.
//
// Points are stamped as small discs into the pixels of one image. A grid over the plane (points sorted by cell) answers "which
// point is under the pointer" without looking at all of them.

const CELLS = 192;
const MOST_PIXELS = 4e6; // of the image; sharper screens get a coarser image rather than a slow one

export class Scatter {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: true });
    this.centre = { x: 0, y: 0 };
    this.zoom = 1;
    this.count = 0;
    this.resize();
  }

  setPoints({ ids, x, y, clusters }) {
    Object.assign(this, { ids, x, y, clusters, count: ids.length });
    this.colours = new Uint32Array(this.count);
    this.faint = new Uint8Array(this.count);
    this.buildCells();
  }

  resize() {
    const box = this.canvas.getBoundingClientRect();
    this.width = Math.max(1, box.width);
    this.height = Math.max(1, box.height);
    this.ratio = Math.min(devicePixelRatio || 1, Math.sqrt(MOST_PIXELS / (this.width * this.height)));
    this.canvas.width = Math.max(1, Math.round(this.width * this.ratio));
    this.canvas.height = Math.max(1, Math.round(this.height * this.ratio));
    this.image = this.context.createImageData(this.canvas.width, this.canvas.height);
    this.pixels = new Uint32Array(this.image.data.buffer);
  }

  /** Screen pixels per unit of the plane. */
  get scale() {
    return (Math.min(this.width, this.height) / 2) * 0.94 * this.zoom;
  }

  toScreen(x, y) {
    return [(x - this.centre.x) * this.scale + this.width / 2, this.height / 2 - (y - this.centre.y) * this.scale];
  }

  toPlane(px, py) {
    return [(px - this.width / 2) / this.scale + this.centre.x, (this.height / 2 - py) / this.scale + this.centre.y];
  }

  panBy(dx, dy) {
    this.centre.x = limit(this.centre.x - dx / this.scale, -1.2, 1.2);
    this.centre.y = limit(this.centre.y + dy / this.scale, -1.2, 1.2);
  }

  /** What is under (px, py) stays there. */
  zoomBy(factor, px, py) {
    const [x, y] = this.toPlane(px, py);
    this.zoom = limit(this.zoom * factor, 0.5, 2000);
    const [nx, ny] = this.toPlane(px, py);
    this.centre.x = limit(this.centre.x + x - nx, -1.2, 1.2);
    this.centre.y = limit(this.centre.y + y - ny, -1.2, 1.2);
  }

  fit() {
    this.zoom = 1;
    this.centre = { x: 0, y: 0 };
  }

  /** Radius of a point on the screen: smaller when there are many, growing slowly with the zoom. */
  get radius() {
    const base = this.count > 100000 ? 1.1 : this.count > 20000 ? 1.5 : this.count > 4000 ? 2.1 : 3;
    return Math.min(7, base * this.zoom ** 0.3);
  }

  /** Draw all points, faint ones first; returns the number on the screen. */
  draw() {
    this.pixels.fill(0);
    const mixed = this.faint.includes(1);
    let shown = mixed ? this.stamp(1, this.radius) : 0;
    shown += this.stamp(0, mixed ? this.radius * 1.3 : this.radius);
    this.context.putImageData(this.image, 0, 0);
    return shown;
  }

  stamp(faintness, radius) {
    const { x, y, colours, faint, pixels, count } = this;
    const { width, height } = this.canvas;
    const r = Math.max(0.5, radius * this.ratio);
    const reach = Math.ceil(r);
    const { full, edge, weights } = disc(r, width);
    const scale = this.scale * this.ratio;
    const left = (this.width / 2) * this.ratio - this.centre.x * scale;
    const bottom = (this.height / 2) * this.ratio + this.centre.y * scale;
    let shown = 0;
    for (let i = 0; i < count; i++) {
      if (faint[i] !== faintness) continue;
      const px = (x[i] * scale + left) | 0;
      const py = (bottom - y[i] * scale) | 0;
      if (px < reach || py < reach || px >= width - reach || py >= height - reach) continue;
      shown++;
      const colour = colours[i];
      const at = py * width + px;
      for (let k = 0; k < full.length; k++) pixels[at + full[k]] = colour;
      for (let k = 0; k < edge.length; k++) pixels[at + edge[k]] = mix(colour, pixels[at + edge[k]], weights[k]);
    }
    return shown;
  }

  buildCells() {
    const starts = new Int32Array(CELLS * CELLS + 1);
    const cells = new Int32Array(this.count);
    for (let i = 0; i < this.count; i++) {
      cells[i] = cell(this.y[i]) * CELLS + cell(this.x[i]);
      starts[cells[i] + 1]++;
    }
    for (let c = 0; c < CELLS * CELLS; c++) starts[c + 1] += starts[c];
    const next = starts.slice();
    const order = new Int32Array(this.count);
    for (let i = 0; i < this.count; i++) order[next[cells[i]]++] = i;
    Object.assign(this, { starts, order });
  }

  /** Calls visit(i) for points whose cells touch a rectangle of the plane. */
  near(x0, y0, x1, y1, visit) {
    for (let row = cell(y0); row <= cell(y1); row++) {
      const from = this.starts[row * CELLS + cell(x0)];
      const to = this.starts[row * CELLS + cell(x1) + 1];
      for (let k = from; k < to; k++) visit(this.order[k]);
    }
  }

  /** The point nearest to a place on the screen, within `reach` pixels, or -1. */
  pick(px, py, reach = 9) {
    if (!this.count) return -1;
    const [x, y] = this.toPlane(px, py);
    const r = reach / this.scale;
    let best = -1;
    let least = r * r;
    this.near(x - r, y - r, x + r, y + r, (i) => {
      const distance = (this.x[i] - x) ** 2 + (this.y[i] - y) ** 2;
      if (distance <= least) [best, least] = [i, distance];
    });
    return best;
  }

  /** Points on the screen, `most` at the most. */
  visible(most) {
    const [x0, y1] = this.toPlane(0, 0);
    const [x1, y0] = this.toPlane(this.width, this.height);
    const found = [];
    this.near(x0, y0, x1, y1, (i) => {
      if (found.length < most && this.x[i] >= x0 && this.x[i] <= x1 && this.y[i] >= y0 && this.y[i] <= y1) found.push(i);
    });
    return found;
  }

  /** Points inside a polygon of the screen: [[px, py], ...]. */
  inside(polygon) {
    const corners = polygon.map(([px, py]) => this.toPlane(px, py));
    const xs = corners.map(([x]) => x);
    const ys = corners.map(([, y]) => y);
    const found = [];
    this.near(Math.min(...xs), Math.min(...ys), Math.max(...xs), Math.max(...ys), (i) => {
      if (contains(corners, this.x[i], this.y[i])) found.push(i);
    });
    return found;
  }
}

function limit(value, low, high) {
  return Math.max(low, Math.min(high, value));
}

function cell(value) {
  return limit(Math.floor(((value + 1) / 2) * CELLS), 0, CELLS - 1);
}

/** Offsets of a disc's pixels in an image of this width: those inside, and those its edge covers to 4 ... 15 parts of 16. */
function disc(radius, width) {
  const [full, edge, weights] = [[], [], []];
  const reach = Math.ceil(radius);
  for (let dy = -reach; dy <= reach; dy++) {
    for (let dx = -reach; dx <= reach; dx++) {
      const covered = Math.round(16 * (radius + 0.5 - Math.hypot(dx, dy)));
      if (covered >= 16) full.push(dy * width + dx);
      else if (covered >= 4) {
        edge.push(dy * width + dx);
        weights.push(covered);
      }
    }
  }
  return { full: Int32Array.from(full), edge: Int32Array.from(edge), weights: Int32Array.from(weights) };
}

/** A colour over another with `weight` parts of 16 (small integers are fast); over nothing, with that much opacity. */
function mix(colour, under, weight) {
  const opacity = under >>> 24;
  if (opacity === 0) return (weight << 28) | (colour & 0xffffff);
  const rest = 16 - weight;
  const redBlue = (((colour & 0xff00ff) * weight + (under & 0xff00ff) * rest) >> 4) & 0xff00ff;
  const green = (((colour & 0x00ff00) * weight + (under & 0x00ff00) * rest) >> 4) & 0x00ff00;
  return (Math.min(255, opacity + (weight << 4)) << 24) | redBlue | green;
}

/** Even-odd rule. */
export function contains(corners, x, y) {
  let inside = false;
  for (let i = 0, j = corners.length - 1; i < corners.length; j = i++) {
    const [xi, yi] = corners[i];
    const [xj, yj] = corners[j];
    if (yi > y !== yj > y && x < ((xj - xi) * (y - yi)) / (yj - yi) + xi) inside = !inside;
  }
  return inside;
}

/** Colour of a cluster as [red, green, blue]; neighbouring numbers get far hues. */
export function colourOf(cluster, dark) {
  if (cluster < 0) return dark ? [96, 98, 104] : [176, 178, 184];
  const hue = (cluster * 0.61803398875) % 1;
  const tier = cluster % 3;
  return fromHue(hue, [0.62, 0.78, 0.5][tier], dark ? [0.62, 0.7, 0.55][tier] : [0.47, 0.4, 0.55][tier]);
}

function fromHue(hue, saturation, lightness) {
  const part = (n) => {
    const k = (n + hue * 12) % 12;
    return Math.round(255 * (lightness - saturation * Math.min(lightness, 1 - lightness) * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  };
  return [part(0), part(8), part(4)];
}

export function packed([red, green, blue]) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}
