// What lies over the points of the map: pictures when few points are on the screen, names of clusters, the lasso.

import { colourOf } from "./scatter.js";
import { clusterName } from "./store.js";

const FEW = 260; // with so few points on the screen they become pictures
const SIDE = 46;
const REMEMBERED = 1500;

export class Overlay {
  constructor(canvas, scatter, redraw) {
    Object.assign(this, { canvas, scatter, redraw });
    this.context = canvas.getContext("2d");
    this.pictures = new Map();
    this.labels = [];
    this.lasso = null;
    this.spot = -1;
    this.resize();
  }

  resize() {
    const ratio = Math.min(2, devicePixelRatio || 1);
    this.canvas.width = Math.round(this.scatter.width * ratio);
    this.canvas.height = Math.round(this.scatter.height * ratio);
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  /** A label in the middle of every named cluster, and of the one that is looked at. */
  findLabels(names, only) {
    const { clusters, x, y, count } = this.scatter;
    const sums = new Map();
    for (let i = 0; i < count; i++) {
      const id = clusters[i];
      if (only === null ? !names.has(id) : id !== only) continue;
      const sum = sums.get(id) ?? { x: 0, y: 0, count: 0 };
      sum.x += x[i];
      sum.y += y[i];
      sum.count += 1;
      sums.set(id, sum);
    }
    this.labels = [...sums]
      .map(([id, sum]) => ({ text: clusterName(id), x: sum.x / sum.count, y: sum.y / sum.count, count: sum.count }))
      .sort((a, b) => b.count - a.count);
  }

  draw(shown, dark) {
    const { context, scatter } = this;
    context.clearRect(0, 0, scatter.width, scatter.height);
    if (shown <= FEW) this.drawPictures(dark);
    this.drawLabels(dark);
    if (this.spot >= 0) this.drawSpot(dark);
    if (this.lasso) this.drawLasso(dark);
  }

  drawPictures(dark) {
    const { context, scatter } = this;
    const taken = [];
    for (const i of scatter.visible(Infinity)) {
      if (scatter.faint[i]) continue;
      const [px, py] = scatter.toScreen(scatter.x[i], scatter.y[i]);
      if (taken.some(([x, y]) => Math.abs(x - px) < SIDE + 3 && Math.abs(y - py) < SIDE + 3)) continue;
      taken.push([px, py]);
      const picture = this.picture(scatter.ids[i]);
      if (!picture.complete || !picture.naturalWidth) continue;
      const scale = SIDE / Math.max(picture.naturalWidth, picture.naturalHeight);
      const [width, height] = [picture.naturalWidth * scale, picture.naturalHeight * scale];
      context.drawImage(picture, px - width / 2, py - height / 2, width, height);
      context.strokeStyle = `rgb(${colourOf(scatter.clusters[i], dark).join(" ")})`;
      context.lineWidth = 2;
      context.strokeRect(px - width / 2, py - height / 2, width, height);
    }
  }

  picture(id) {
    let picture = this.pictures.get(id);
    if (!picture) {
      picture = new Image();
      picture.addEventListener("load", () => this.redraw());
      picture.src = `/thumb/${id}?size=96`;
      this.pictures.set(id, picture);
      if (this.pictures.size > REMEMBERED) this.pictures.delete(this.pictures.keys().next().value);
    }
    return picture;
  }

  drawLabels(dark) {
    const { context, scatter } = this;
    context.font = "600 13px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.lineJoin = "round";
    const boxes = [];
    for (const label of this.labels) {
      const [px, py] = scatter.toScreen(label.x, label.y);
      const text = label.text.length > 28 ? `${label.text.slice(0, 27)}…` : label.text;
      const half = context.measureText(text).width / 2 + 4;
      if (px < -half || py < -10 || px > scatter.width + half || py > scatter.height + 10) continue;
      if (boxes.some(([x, y, h]) => Math.abs(x - px) < h + half && Math.abs(y - py) < 20)) continue;
      boxes.push([px, py, half]);
      context.lineWidth = 4;
      context.strokeStyle = dark ? "rgb(20 21 24 / 85%)" : "rgb(255 255 255 / 88%)";
      context.strokeText(text, px, py);
      context.fillStyle = dark ? "#fff" : "#17181c";
      context.fillText(text, px, py);
    }
  }

  drawSpot(dark) {
    const { context, scatter, spot } = this;
    const [px, py] = scatter.toScreen(scatter.x[spot], scatter.y[spot]);
    context.beginPath();
    context.arc(px, py, scatter.radius + 4, 0, 2 * Math.PI);
    context.lineWidth = 2;
    context.strokeStyle = dark ? "#fff" : "#17181c";
    context.stroke();
  }

  drawLasso(dark) {
    const { context, lasso } = this;
    context.beginPath();
    for (const [px, py] of lasso) context.lineTo(px, py);
    context.closePath();
    context.fillStyle = dark ? "rgb(122 162 255 / 16%)" : "rgb(47 95 224 / 12%)";
    context.fill();
    context.lineWidth = 1.5;
    context.setLineDash([6, 4]);
    context.strokeStyle = dark ? "#8fb1ff" : "#2f5fe0";
    context.stroke();
    context.setLineDash([]);
  }
}
