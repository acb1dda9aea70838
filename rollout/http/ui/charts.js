// Charts of the worker's activity, with weight pushes as marks, and a list of the same events.
import { clock, make } from "./base.js";

const HEIGHT = 120;
const HIT_SECONDS = 30;
const MOST_EVENTS = 50;
const MINUTES = [1, 2, 5, 10, 15, 30].map((minutes) => 60 * minutes); // distances of the times on the axis
const LEAST_SECONDS = 60;
const FINE = new Set(["ready", "updating"]); // a worker generates while it receives weights, so this is no event
const count = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const minute = (seconds) => clock(seconds).slice(0, 5);
const percent = (value) => {
  if (value > 0 && value < 0.001) return "<0.1 %";
  return `${(100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0)} %`;
};

const scaled = (font) => font.replace(/^\d+/, (size) => size * devicePixelRatio);

// Return the growth of counters since `seconds` before look i, and the time between, in seconds; null if there was another
// worker then, or if it did not answer.
function growth(looks, i, seconds, ...names) {
  let j = i - 1;
  while (j > 0 && looks[i].time - looks[j].time < seconds) j--;
  if (j < 0 || looks[j].instance === null || looks[j].instance !== looks[i].instance) return null;
  const grown = names.map((name) => looks[i][name] - looks[j][name]);
  return [...grown, looks[i].time - looks[j].time];
}

function rate(looks, i, sign) {
  const grown = growth(looks, i, 0, "computed_tokens", "computed_prompt_tokens");
  return grown && (sign ? grown[0] - grown[1] : grown[1]) / grown[2];
}

function hitRate(looks, i) {
  const grown = growth(looks, i, HIT_SECONDS, "prefix_hits", "prefix_queries");
  return grown && grown[1] > 0 ? grown[0] / grown[1] : null;
}

function share(look, name) {
  return look.in_use === null ? null : look[name] / (look.in_use + look.cached + look.empty || 1);
}

const CHARTS = [
  { title: "Tokens per second", format: count, series: [
    ["generated", (looks, i) => rate(looks, i, true)],
    ["prompt", (looks, i) => rate(looks, i, false)],
  ] },
  { title: "Queue, in samples", format: count, series: [
    ["running", (looks, i) => looks[i].num_running],
    ["waiting", (looks, i) => looks[i].num_waiting],
  ] },
  { title: "KV cache blocks", format: percent, most: 1, series: [
    ["in use", (looks, i) => share(looks[i], "in_use")],
    ["cached", (looks, i) => share(looks[i], "cached")],
  ] },
  { title: `Prefix hits, last ${HIT_SECONDS} s`, format: percent, most: 1, series: [["of prompt tokens", hitRate]] },
];

// Return the changes between two consecutive looks.
function changes(before, now) {
  const found = [];
  if (before.state !== now.state && !(FINE.has(before.state) && FINE.has(now.state)))
    found.push({ text: `${before.state} → ${now.state}` });
  if (now.instance !== null && before.known !== undefined && before.known !== now.instance)
    found.push({ text: "new worker", mark: "new" });
  if (now.weight_version !== null && before.version !== undefined && before.version !== now.weight_version)
    found.push({ text: `weights ${before.version} → ${now.weight_version}`, mark: `${now.weight_version}` });
  return found;
}

function eventsOf(looks) {
  const events = [];
  let before = null;
  for (const look of looks) {
    if (before) events.push(...changes(before, look).map((change) => ({ time: look.time, ...change })));
    const version = look.weight_version ?? before?.version;
    before = { state: look.state, known: look.instance ?? before?.known, version };
  }
  return events;
}

// Return [from, to] for each period in which the worker was not ready.
function gaps(looks) {
  const found = [];
  for (let i = 0; i < looks.length; i++) {
    if (FINE.has(looks[i].state)) continue;
    const from = looks[i].time;
    while (i < looks.length && !FINE.has(looks[i].state)) i++;
    found.push([from, looks[Math.min(i, looks.length - 1)].time]);
  }
  return found;
}

export class Charts {
  constructor(place, list) {
    this.list = list;
    this.events = [];
    this.gaps = [];
    this.range = [0, 1];
    this.charts = CHARTS.map((spec) => this.chart(spec, place));
    matchMedia("(prefers-color-scheme: dark)").onchange = () => this.charts.forEach(({ plot }) => plot.redraw());
    new ResizeObserver(() => this.fit()).observe(place);
  }

  chart(spec, place) {
    const values = spec.series.map(([name], i) => {
      const value = make("b", {}, "–");
      return { value, line: make("span", { className: `series s${i}` }, value, ` ${name}`) };
    });
    const title = make("h2", {}, spec.title);
    const box = make("div", { ariaHidden: "true" });
    const panel = make("section", { className: "panel" }, title, make("p", {}, ...values.map(({ line }) => line)), box);
    panel.setAttribute("aria-label", spec.title);
    place.insertBefore(panel, place.lastElementChild);
    const chart = { spec, box, values: values.map(({ value }) => value) };
    chart.plot = new uPlot(this.options(chart), [[], ...spec.series.map(() => [])], box);
    return chart;
  }

  options(chart) {
    const color = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(name);
    const axis = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } };
    const font = "11px system-ui, sans-serif";
    const top = (least, most) => chart.spec.most ?? Math.max(1, most * 1.15);
    return {
      width: 240,
      height: HEIGHT,
      padding: [10, 16, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { size: 5 }, drag: { x: false }, sync: { key: "time" } },
      scales: { x: { range: () => this.range }, y: { range: (plot, least, most) => [0, top(least, most)] } },
      axes: [
        { ...axis, font, size: 24, gap: 6, space: 50, incrs: MINUTES, values: (plot, times) => times.map(minute) },
        { ...axis, font, size: 42, gap: 4, space: 28, values: (plot, marks) => marks.map(chart.spec.format) },
      ],
      series: [{}, ...chart.spec.series.map((_, i) => ({
        stroke: color(`--series-${i}`), width: 1.5, points: { show: false }, spanGaps: false,
      }))],
      hooks: {
        drawClear: [(plot) => this.drawGaps(plot, color("--gap")())],
        draw: [
          (plot) => this.drawMarks(plot, color("--mark")(), font),
          (plot) => this.drawNone(plot, color("--dim")(), font),
        ],
        setCursor: [() => this.say(chart)],
      },
    };
  }

  draw(looks, seconds, now) {
    const before = this.events.at(-1)?.time;
    this.range = [Math.min(Math.max(now - seconds, looks[0]?.time ?? now), now - LEAST_SECONDS), now];
    this.events = eventsOf(looks);
    this.gaps = gaps(looks);
    const first = Math.max(0, looks.findIndex(({ time }) => time >= this.range[0]) - 1);
    const shown = looks.slice(first);
    for (const chart of this.charts) {
      const columns = chart.spec.series.map(([, read]) => shown.map((_, i) => read(looks, first + i)));
      chart.plot.setData([shown.map(({ time }) => time), ...columns]);
      this.say(chart);
    }
    if (this.events.at(-1)?.time !== before || !this.list.childElementCount) this.tell();
  }

  tell() {
    const told = this.events.slice(-MOST_EVENTS).reverse();
    this.list.replaceChildren(...told.map(({ time, text }) => make("li", {}, make("time", {}, clock(time)), text)));
    if (!told.length) this.list.append(make("li", { className: "dim" }, "none yet"));
  }

  // Show the values at the cursor, or the last ones if there is no cursor.
  say({ spec, plot, values }) {
    const [times, ...columns] = plot?.data ?? [[]];
    const at = plot?.cursor.idx ?? times.length - 1;
    columns.forEach((column, i) => { values[i].textContent = column[at] == null ? "–" : spec.format(column[at]); });
  }

  drawGaps({ ctx, bbox, valToPos }, color) {
    ctx.fillStyle = color;
    for (const [from, to] of this.gaps) {
      const left = Math.max(bbox.left, valToPos(from, "x", true));
      const right = Math.min(bbox.left + bbox.width, valToPos(to, "x", true));
      if (right > left) ctx.fillRect(left, bbox.top, right - left, bbox.height);
    }
  }

  drawNone({ ctx, bbox, data }, color, font) {
    if (data.slice(1).some((column) => column.some((value) => value !== null))) return;
    ctx.save();
    ctx.fillStyle = color;
    ctx.font = scaled(font);
    ctx.textAlign = "center";
    ctx.fillText("no data yet", bbox.left + bbox.width / 2, bbox.top + bbox.height / 4); // between the lines of the grid
    ctx.restore();
  }

  drawMarks({ ctx, bbox, valToPos }, color, font) {
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = color;
    ctx.lineWidth = devicePixelRatio;
    ctx.font = scaled(font);
    ctx.textBaseline = "top";
    ctx.textAlign = "left";
    let free = -Infinity;
    for (const { time, mark } of this.events) {
      const left = Math.round(valToPos(time, "x", true));
      if (mark === undefined || left < bbox.left) continue;
      ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
      if (left < free) continue; // no room for the label
      ctx.fillText(mark, left + 3 * devicePixelRatio, bbox.top);
      free = left + ctx.measureText(mark).width + 6 * devicePixelRatio;
    }
    ctx.restore();
  }

  fit() {
    for (const { plot, box } of this.charts) {
      if (box.clientWidth) plot.setSize({ width: box.clientWidth, height: HEIGHT });
    }
  }
}
