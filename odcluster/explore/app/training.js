// How training went, or goes: curves that follow a run while it trains.

import { get } from "./api.js";
import { chart, sizesChart } from "./charts.js";
import { el, number } from "./dom.js";
import { complain } from "./notices.js";

const TITLES = {
  loss: "Loss",
  change: "Share of labels changed per step",
  largest: "Largest cluster",
  smallest: "Smallest cluster",
  small_clusters: "Small clusters handled per step",
  accuracy: "Share of right answers",
  nmi_previous: "NMI with the labels of the epoch before",
  lr: "Learning rate",
  seconds: "Seconds per record",
};

const STATES = { training: "Training", finished: "Finished", stopped: "Stopped" };

export function training() {
  const state = el("p", { class: "summary" });
  const progress = el("progress", { "aria-label": "Training", max: "1", value: "0" });
  const charts = el("div", { class: "charts" });
  const element = el("section", {}, el("h1", {}, "Training"), el("div", { class: "summary-row" }, state, progress), charts);
  let timer = 0;
  let shown = "";
  let closed = false;

  async function refresh() {
    clearTimeout(timer);
    const answer = await get("/api/training");
    if (closed) return;
    const words = [STATES[answer.state] ?? answer.state];
    if (answer.total_steps) words.push(`step ${number(answer.step)} of ${number(answer.total_steps)}`);
    if (answer.state === "training" && answer.eta_seconds !== null) words.push(`about ${duration(answer.eta_seconds)} left`);
    if (answer.state === "stopped") words.push("`odcluster resume` goes on with it");
    state.textContent = words.join(" · ");
    progress.value = answer.total_steps ? answer.step / answer.total_steps : 0;
    const content = JSON.stringify([answer.series, answer.sizes]);
    // A chart under the pointer is left alone: it would lose the value that is being read.
    if (content !== shown && !(shown && charts.matches(":hover"))) {
      shown = content;
      draw(answer);
    }
    if (answer.state === "training") timer = setTimeout(() => refresh().catch(complain), 3000);
  }

  function draw({ series, sizes }) {
    const order = Object.keys(TITLES);
    const rank = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
    const names = Object.keys(series).filter((name) => series[name].length > 1).sort((a, b) => rank(a) - rank(b));
    const figures = names.map((name) => chart(TITLES[name] ?? name.replaceAll("_", " "), series[name]));
    if (sizes?.length) figures.splice(Math.min(2, figures.length), 0, sizesChart("Cluster sizes: all, the middle half, the median", sizes));
    charts.replaceChildren(...(figures.length ? figures : [el("p", { class: "empty" }, "No number has been recorded yet.")]));
  }

  return {
    title: "Training",
    element,
    refresh,
    keys: {},
    close: () => {
      closed = true;
      clearTimeout(timer);
    },
  };
}

function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} seconds`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} minutes`;
  return `${(seconds / 3600).toFixed(1)} hours`;
}
