// The panel of experts: asks /experts while somebody looks, and shows what it says.

import {drawHeat, drawScale, layoutOf, sharesOf, squareAt, stopsOf} from "./heat.js";
import {getJson} from "./stream.js";

const EVERY_MS = 2000;
const $ = (id) => document.getElementById(id);
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
const whole = new Intl.NumberFormat();

export function bytesOf(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) {
    count /= 1000;
    unit++;
  }
  return `${unit && count < 100 ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

export class ExpertsPanel {
  #key;
  #report = null;
  #shares = null;
  #layout = null;
  #chosen = null;
  #seen = false;    // whether the panel is within the window
  #timer = null;
  #theme = null;

  // `key` gives the API key of the moment.
  constructor(key) {
    this.#key = key;
    const canvas = $("heat");
    new IntersectionObserver(([entry]) => {
      this.#seen = entry.isIntersecting;
      this.#wake();
    }).observe($("experts"));
    new ResizeObserver(() => this.#draw()).observe(canvas.parentElement);
    document.addEventListener("visibilitychange", () => this.#wake());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.#theme = null;
      this.#draw();
    });
    canvas.addEventListener("pointermove", ({offsetX, offsetY}) => this.#point(offsetX, offsetY));
    canvas.addEventListener("pointerleave", () => this.#choose(null));
    canvas.addEventListener("blur", () => this.#choose(null));
    canvas.addEventListener("keydown", (event) => this.#move(event));
  }

  // Asks now, and again as long as somebody looks.
  async refresh() {
    clearTimeout(this.#timer);
    this.#timer = null;
    try {
      const report = await getJson("experts", this.#key());
      if (report?.layers?.length) this.#show(report);
    } catch (error) {
      $("experts-facts").textContent = `No data: ${error.message}`;
      if (error.status === 401) return;  // asked again with another key
    }
    this.#wake();
  }

  #wake() {
    const looked = this.#seen && document.visibilityState === "visible";
    if (!looked) {
      clearTimeout(this.#timer);
      this.#timer = null;
    } else if (this.#timer === null) {
      this.#timer = setTimeout(() => this.refresh(), EVERY_MS);
    }
  }

  #show(report) {
    this.#report = report;
    this.#shares = sharesOf(report);
    this.#facts();
    this.#table();
    this.#draw();
  }

  #facts() {
    const {mode, k, layers, bytes, prediction, sampled_steps: steps} = this.#report;
    const sum = (name) => layers.reduce((total, layer) => total + layer[name], 0);
    const looked = sum("hits") + sum("misses");
    const facts = [`mode ${mode}`, `own K ${k}`, `${whole.format(steps)} steps sampled`];
    if (mode !== "resident") {
      if (looked) facts.push(`${percent(sum("hits") / looked)} hits`);
      facts.push(`${bytesOf(bytes.demand)} loaded on demand`);
      if (bytes.prefetch) {
        facts.push(`${bytesOf(bytes.prefetch)} prefetched, ${bytesOf(bytes.wasted)} of it unused`);
      }
    }
    const recall = prediction?.recall?.[0];
    if (recall != null) facts.push(`prediction finds ${percent(recall, 0)}`);
    $("experts-facts").textContent = facts.join(" · ");
    $("resident-key").hidden = mode === "resident";
    const {most} = this.#shares;
    $("scale-middle").textContent = most ? percent(most / 4) : "";
    $("scale-most").textContent = most ? percent(most) : "";
    const used = layers.map((layer) => layer.used.filter((count) => count).length);
    const label = `Use of ${layers[0].used.length} experts in ${layers.length} layers; `;
    $("heat").setAttribute("aria-label",
      `${label}${Math.min(...used)} to ${Math.max(...used)} of a layer were used. Details by layer below.`);
  }

  #table() {
    const rows = this.#report.layers.map((layer) => {
      const row = document.createElement("tr");
      const used = layer.used.filter((count) => count).length;
      const cells = [
        layer.layer, layer.slots, layer.resident.length, used, layer.hits, layer.misses,
        layer.hit_ratio === null ? "–" : percent(layer.hit_ratio),
      ];
      cells.forEach((value, place) => {
        const cell = document.createElement(place ? "td" : "th");
        if (!place) cell.scope = "row";
        cell.textContent = typeof value === "number" ? whole.format(value) : value;
        row.append(cell);
      });
      return row;
    });
    $("layers").replaceChildren(...rows);
  }

  #draw() {
    const canvas = $("heat");
    if (!this.#report || !canvas.clientWidth) return;
    this.#theme ??= themeOf(canvas);
    const {layers} = this.#report;
    this.#layout = layoutOf(layers.length, layers[0].used.length, canvas.clientWidth);
    drawHeat(canvas, this.#layout, this.#report, this.#shares, this.#theme, this.#chosen);
    drawScale($("scale"), this.#theme);
    this.#tell();
  }

  #point(x, y) {
    if (this.#layout) this.#choose(squareAt(this.#layout, x, y));
  }

  #choose(square) {
    this.#chosen = square;
    this.#draw();
  }

  #move(event) {
    if (!this.#layout) return;
    const {columns, experts, layers, lines} = this.#layout;
    const {row, expert} = this.#chosen ?? {row: 0, expert: -1};
    const next = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns}[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const at = this.#chosen ? expert + next : 0;
    const column = Math.max(expert, 0) % columns;
    if (at >= experts && row + 1 < layers) {
      this.#choose({row: row + 1, expert: next === 1 ? 0 : column});
    } else if (at < 0 && row > 0) {
      const last = Math.min((lines - 1) * columns + column, experts - 1);
      this.#choose({row: row - 1, expert: next === -1 ? experts - 1 : last});
    } else if (at >= 0 && at < experts) {
      this.#choose({row, expert: at});
    }
  }

  #tell() {
    const text = this.#chosen ? this.#textOf(this.#chosen) : "\u00a0";
    if ($("cell").textContent !== text) $("cell").textContent = text;
  }

  #textOf({row, expert}) {
    const {layer, used, resident} = this.#report.layers[row];
    const share = percent(this.#shares.rows[row][expert], 2);
    const place = resident.includes(expert) ? "in a slot" : "not in a slot";
    const where = this.#report.mode === "resident" ? "" : `, ${place}`;
    return `Layer ${layer}, expert ${expert}: ${share} of choices (${whole.format(used[expert])})${where}`;
  }
}

// The style sheet says which colours; they follow light and dark.
function themeOf(element) {
  const style = getComputedStyle(element);
  const value = (name) => style.getPropertyValue(name).trim();
  return {
    stops: stopsOf(value("--heat")),
    unused: value("--unused"),
    resident: value("--resident"),
    text: value("--text"),
    font: `11px ${style.fontFamily}`,
  };
}
