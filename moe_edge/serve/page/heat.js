// The map of experts: where squares stand, which colour they have, and drawing them.

const LABEL = 30;     // pixels left of the squares, for the layer's number
const LEAST = 8, GOOD = 12, MOST = 18;  // of a square and its gap
const TALL = 600;     // a map of good squares is no taller
const GAP = 1, BETWEEN = 6;

// Where all squares stand in so many pixels: in as few lines a layer as squares of a
// good size allow, of a small size if the map would be too tall.
export function layoutOf(layers, experts, width) {
  const room = Math.max(width - LABEL, LEAST);
  const of = (lines) => {
    // Sub-experts of one expert stay together: they are neighbours, often four.
    const columns = Math.min(4 * Math.ceil(experts / lines / 4), experts);
    const size = Math.min(MOST, Math.floor(room / columns));
    const step = Math.ceil(experts / columns) * size + BETWEEN;
    return {layers, experts, lines: Math.ceil(experts / columns), columns, size, step, height: layers * step};
  };
  const all = Array.from({length: experts}, (_, i) => of(i + 1));
  return all.find(({size, height}) => size >= GOOD && height <= TALL)
    ?? all.find(({size}) => size >= LEAST) ?? all.at(-1);
}

// Left upper corner of a square.
export function placeOf(layout, row, expert) {
  const line = Math.floor(expert / layout.columns);
  return {
    x: LABEL + (expert % layout.columns) * layout.size,
    y: row * layout.step + line * layout.size,
  };
}

// Which square is at a point: {row, expert}, or null.
export function squareAt(layout, x, y) {
  const column = Math.floor((x - LABEL) / layout.size);
  const row = Math.floor(y / layout.step);
  const line = Math.floor((y - row * layout.step) / layout.size);
  const expert = line * layout.columns + column;
  const inside = column >= 0 && column < layout.columns && row >= 0 && row < layout.layers;
  return inside && line < layout.lines && expert < layout.experts ? {row, expert} : null;
}

// Share of each expert in its layer's choices, and the largest of all.
export function sharesOf(report) {
  const rows = report.layers.map(({used}) => {
    const total = used.reduce((sum, count) => sum + count, 0);
    return used.map((count) => (total ? count / total : 0));
  });
  return {rows, most: Math.max(0, ...rows.map((row) => Math.max(0, ...row)))};
}

// 0..1 along the colours: roots, so that rarely used experts are told apart too.
export function shade(share, most) {
  return most > 0 ? Math.sqrt(share / most) : 0;
}

// "r g b, r g b, .." as a list of [r, g, b].
export function stopsOf(text) {
  return text.split(",").map((stop) => stop.trim().split(/\s+/).map(Number));
}

// A colour between those of such a list.
export function colour(stops, at) {
  const place = Math.min(Math.max(at, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  const mixed = stops[low].map((value, i) =>
    Math.round(value + (stops[low + 1][i] - value) * (place - low)));
  return `rgb(${mixed.join(" ")})`;
}

function sized(canvas, width, height) {
  const ratio = globalThis.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

// Draws a report of /experts; `chosen` is the square of the keyboard, or null.
export function drawHeat(canvas, layout, report, shares, theme, chosen) {
  const context = sized(canvas, canvas.clientWidth, layout.height);
  const side = layout.size - GAP;
  context.font = theme.font;
  context.textBaseline = "top";
  report.layers.forEach(({layer, resident}, row) => {
    context.fillStyle = theme.text;
    context.fillText(`${layer}`, 2, row * layout.step);
    shares.rows[row].forEach((share, expert) => {
      const {x, y} = placeOf(layout, row, expert);
      context.fillStyle = share ? colour(theme.stops, shade(share, shares.most)) : theme.unused;
      context.fillRect(x, y, side, side);
    });
    if (report.mode === "resident") return;
    context.strokeStyle = theme.resident;
    context.lineWidth = 1.5;
    for (const expert of resident) {
      const {x, y} = placeOf(layout, row, expert);
      context.strokeRect(x + 0.75, y + 0.75, side - 1.5, side - 1.5);
    }
  });
  if (chosen) {
    const {x, y} = placeOf(layout, chosen.row, chosen.expert);
    context.strokeStyle = theme.text;
    context.lineWidth = 2;
    context.strokeRect(x - 1, y - 1, side + 2, side + 2);
  }
}

export function drawScale(canvas, theme) {
  const width = 160, height = 12;
  const context = sized(canvas, width, height);
  for (let x = 0; x < width; x++) {
    context.fillStyle = colour(theme.stops, x / (width - 1));
    context.fillRect(x, 0, 1, height);
  }
}
