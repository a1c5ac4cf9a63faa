// Charts in SVG: lines with bands over time, stacks, histograms. Each can be read with the mouse and with the arrow keys.

const MARGIN = { left: 46, top: 24, bottom: 22 };
const LETTER_PX = 6.9;
const GAP = 6; // A line is broken where two points are so many times as far apart as they usually are.
const LABEL_PX = 12;

/** A number in few digits, as people write it. */
export function text(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 100) return Math.round(value).toLocaleString("en-US");
  if (size >= 10) return trimmed(value.toFixed(1));
  if (size >= 1) return trimmed(value.toFixed(2));
  if (size >= 0.01) return trimmed(value.toFixed(3));
  return value.toExponential(0).replace("e-", "e−");
}

function trimmed(digits) {
  return digits.includes(".") ? digits.replace(/\.?0+$/, "") : digits;
}

export function make(tag, attributes = {}, content = "") {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(content);
  return element;
}

/** Seconds since the run began, as a clock shows them. */
export function clock(seconds) {
  const s = Math.max(0, Math.round(seconds));
  const two = (n) => String(n).padStart(2, "0");
  const minutes = Math.floor(s / 60) % 60;
  return s >= 3600 ? `${Math.floor(s / 3600)}:${two(minutes)}:${two(s % 60)}` : `${minutes}:${two(s % 60)}`;
}

/** At most `most` points [x, y, …] in which neighbours are averaged. */
export function thin(points, most = 130) {
  if (points.length <= most) return points;
  const size = points.length / most;
  const found = [];
  for (let i = 0; i < most; i++) {
    const part = points.slice(Math.floor(i * size), Math.floor((i + 1) * size));
    found.push(part[0].map((_, column) => part.reduce((sum, point) => sum + point[column], 0) / part.length));
  }
  return found;
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) found.push(value);
  return found;
}

/** Ticks at multiples of one of these rising steps, at most about `count`. */
export function ticksOf(steps, low, high, count) {
  const last = steps[steps.length - 1];
  const step = steps.find((n) => (high - low) / n <= count) ?? last * Math.ceil((high - low) / count / last);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) found.push(value);
  return found;
}

const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 180, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
const timeTicks = (...range) => ticksOf(SECONDS, ...range);

function escaped(value) {
  return String(value).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
}

/**
 * A chart in an element. `draw` takes
 *   lines: [{name, color, points: [[x, y], …], band: [[x, low, high], …], dots, thin, steps}]
 *   stack: {names, colors, rows: [[x0, x1, [values]], …], gaps}
 *   x: [low, high], marks: [x, …] (restarts), rule: {y, name}
 */
export class Chart {
  constructor(host, options) {
    this.host = host;
    this.options = { unit: "", height: 168, xText: clock, xTicks: timeTicks, yText: text, ...options };
    this.at = null;
    this.svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    this.svg.setAttribute("tabindex", "0");
    this.svg.setAttribute("role", "img");
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    this.tip.setAttribute("role", "status");
    host.append(this.svg, this.tip);
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.leave());
    this.svg.addEventListener("blur", () => this.leave());
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.data && this.draw(this.data)).observe(host);
  }

  draw(data) {
    this.data = data;
    const { options } = this;
    const width = Math.max(160, this.host.clientWidth);
    const height = options.height;
    const lines = (data.lines ?? []).filter((line) => line.points.length);
    const stack = data.stack;
    const isEmpty = !lines.length && !(stack && stack.rows.length);
    const named = [...lines.filter((line) => !line.unlabelled).map((line) => line.name), data.rule?.name ?? ""];
    const right = 14 + LETTER_PX * Math.max(...named.map((name) => name.length));
    const inner = { x0: MARGIN.left, x1: width - right, y0: height - MARGIN.bottom, y1: MARGIN.top };
    this.xs = this.positions(lines, stack);
    const [xLow, xHigh] = data.x ?? extent(this.xs);
    const span = xHigh - xLow || 1;
    const px = (x) => inner.x0 + ((x - xLow) / span) * (inner.x1 - inner.x0);
    const { yTicks, py } = this.vertical(lines, stack, data.rule, inner);
    const parts = [];
    for (const y of yTicks) {
      const at = py(y).toFixed(1);
      parts.push(`<line class="grid" x1="${inner.x0}" x2="${inner.x1}" y1="${at}" y2="${at}"/>`);
      parts.push(`<text class="axis" x="${inner.x0 - 6}" y="${at}" text-anchor="end" dy="0.32em">${escaped(options.yText(y))}</text>`);
    }
    parts.push(`<text class="unit" x="2" y="11">${escaped(options.unit)}</text>`);
    if (!isEmpty) {
      for (const x of options.xTicks(xLow, xHigh, Math.max(3, Math.floor(width / 95)))) {
        parts.push(`<text class="axis" x="${px(x).toFixed(1)}" y="${height - 6}" text-anchor="middle">${escaped(options.xText(x))}</text>`);
      }
    }
    for (const x of data.marks ?? []) {
      if (x > xLow && x < xHigh) {
        parts.push(`<line class="mark" x1="${px(x)}" x2="${px(x)}" y1="${inner.y0}" y2="${inner.y1}"/>`);
        parts.push(`<text class="unit" x="${px(x) + 3}" y="${inner.y1 + 9}">restart</text>`);
      }
    }
    if (data.rule) {
      const at = py(data.rule.y).toFixed(1);
      parts.push(`<line class="rule" x1="${inner.x0}" x2="${inner.x1}" y1="${at}" y2="${at}"/>`);
    }
    const labels = data.rule ? [{ y: py(data.rule.y), name: data.rule.name, color: "muted" }] : [];
    if (stack) this.drawStack(stack, px, py, inner, parts);
    for (const line of lines) labels.push(...this.drawLine(line, px, py, inner, parts));
    if (isEmpty) {
      const middle = (inner.x0 + inner.x1) / 2;
      parts.push(`<text class="empty" x="${middle}" y="${(inner.y0 + inner.y1) / 2}" text-anchor="middle">nothing yet</text>`);
    } else {
      parts.push(...placed(labels, inner));
    }
    parts.push('<g class="cross"></g>');
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", height);
    this.svg.setAttribute("aria-label", `${options.label}. ${this.summary(lines, stack)}`);
    this.svg.innerHTML = parts.join("");
    this.scale = { px, inner, xLow, span, width };
    this.drawCross();
  }

  /** The positions that can be read. */
  positions(lines, stack) {
    if (stack) return stack.rows.map((row) => (row[0] + row[1]) / 2);
    const longest = lines.reduce((best, line) => (line.points.length > best.length ? line.points : best), []);
    return longest.map((point) => point[0]);
  }

  vertical(lines, stack, rule, inner) {
    const { options } = this;
    const values = lines.flatMap((line) => [
      ...line.points.map((point) => point[1]),
      ...(line.band ?? []).map((point) => point[2]),
    ]);
    if (stack) for (const row of stack.rows) values.push(row[2].reduce((sum, value) => sum + value, 0));
    if (rule) values.push(rule.y);
    if (options.log) {
      const low = Math.log10(options.min);
      const high = Math.log10(options.max);
      const yTicks = [];
      for (let power = low; power <= high + 1e-9; power++) yTicks.push(10 ** power);
      const share = (y) => (Math.log10(Math.max(y, options.min)) - low) / (high - low);
      return { yTicks, py: (y) => inner.y0 - share(y) * (inner.y0 - inner.y1) };
    }
    const low = options.min ?? Math.min(0, ...values);
    let high = options.max ?? Math.max(...values, 0);
    if (!(high > low)) high = low + 1;
    if (options.max === undefined) high += (high - low) * 0.06;
    return { yTicks: ticks(low, high, 5), py: (y) => inner.y0 - ((y - low) / (high - low)) * (inner.y0 - inner.y1) };
  }

  drawLine(line, px, py, inner, parts) {
    const clip = (x) => x >= inner.x0 - 0.5 && x <= inner.x1 + 0.5;
    const points = line.points.map(([x, y]) => [px(x), py(y)]).filter(([x]) => clip(x));
    if (!points.length) return [];
    const color = `var(--${line.color})`;
    if (line.band && line.band.length > 1) {
      const band = line.band.map(([x, low, high]) => [px(x), py(low), py(high)]).filter(([x]) => clip(x));
      const up = band.map(([x, , high]) => `${x.toFixed(1)},${high.toFixed(1)}`);
      const down = band.map(([x, low]) => `${x.toFixed(1)},${low.toFixed(1)}`).reverse();
      parts.push(`<polygon points="${[...up, ...down].join(" ")}" fill="${color}" class="band"/>`);
    }
    let path = "";
    const apart = GAP * middle(points.slice(1).map(([x], i) => x - points[i][0]));
    points.forEach(([x, y], i) => {
      const isGap = i > 0 && !line.dots && x - points[i - 1][0] > apart;
      if (i === 0 || isGap) path += `M${x.toFixed(1)},${y.toFixed(1)}`;
      else if (line.steps) path += `H${x.toFixed(1)}V${y.toFixed(1)}`;
      else path += `L${x.toFixed(1)},${y.toFixed(1)}`;
    });
    parts.push(`<path d="${path}" stroke="${color}" class="line${line.faint ? " faint" : ""}${line.thin ? " thin" : ""}"/>`);
    if (line.dots || points.length === 1) {
      for (const [x, y] of points) parts.push(`<circle cx="${x.toFixed(1)}" cy="${y.toFixed(1)}" r="3" fill="${color}"/>`);
    }
    const last = points[points.length - 1];
    return line.name && !line.unlabelled ? [{ y: line.labelAt ? py(line.labelAt) : last[1], name: line.name, color: line.color }] : [];
  }

  drawStack(stack, px, py, inner, parts) {
    for (const [x0, x1, values] of stack.rows) {
      const left = Math.max(inner.x0, px(x0));
      const width = Math.min(inner.x1, px(x1)) - left;
      if (width <= 0) continue;
      const gap = width > 4 && stack.gaps ? 1 : -0.25;
      let sum = 0;
      values.forEach((value, i) => {
        const below = py(sum);
        sum += value;
        const above = py(sum);
        if (value > 0) {
          parts.push(
            `<rect x="${left.toFixed(2)}" width="${(width - gap).toFixed(2)}" y="${above.toFixed(2)}" height="${(below - above).toFixed(2)}" fill="var(--${stack.colors[i]})"/>`,
          );
        }
      });
    }
  }

  summary(lines, stack) {
    if (stack) {
      const row = stack.rows[stack.rows.length - 1];
      return row ? stack.names.map((name, i) => `${name} ${this.options.yText(row[2][i])}`).join(", ") : "nothing yet";
    }
    const last = (line) => line.points[line.points.length - 1][1];
    return lines.map((line) => `${line.name || "value"} ${this.options.yText(last(line))} ${this.options.unit}`).join(", ") || "nothing yet";
  }

  point(offset) {
    if (!this.scale || !this.xs.length) return;
    const x = this.scale.xLow + ((offset - this.scale.inner.x0) / (this.scale.inner.x1 - this.scale.inner.x0)) * this.scale.span;
    this.at = nearest(this.xs, x);
    this.drawCross();
  }

  key(event) {
    if (!this.xs?.length || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
    event.preventDefault();
    if (event.key === "Escape") return this.leave();
    const last = this.xs.length - 1;
    const here = this.at === null ? last + (event.key === "ArrowLeft" ? 1 : 0) : this.xs.indexOf(nearest(this.xs, this.at));
    const next = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: last }[event.key];
    this.at = this.xs[Math.max(0, Math.min(last, next))];
    this.drawCross();
  }

  leave() {
    this.at = null;
    this.drawCross();
  }

  drawCross() {
    const group = this.svg.querySelector(".cross");
    if (this.at === null || !this.xs.length || !group) {
      this.tip.hidden = true;
      if (group) group.innerHTML = "";
      return;
    }
    const { px, inner, width } = this.scale;
    const x = nearest(this.xs, this.at);
    const at = px(x);
    group.innerHTML = `<line x1="${at}" x2="${at}" y1="${inner.y0}" y2="${inner.y1}"/>`;
    const rows = this.rows(x).map(
      ([name, value, color]) =>
        `<div><i class="key" style="background:var(--${color})"></i><span>${escaped(name)}</span><b>${escaped(value)}</b></div>`,
    );
    this.tip.innerHTML = `<em>${escaped(this.options.tipText ? this.options.tipText(x) : this.options.xText(x))}</em>${rows.join("")}`;
    this.tip.hidden = false;
    const half = this.tip.offsetWidth / 2;
    this.tip.style.left = `${Math.min(width - 2 * half, Math.max(0, at - half))}px`;
  }

  rows(x) {
    const unit = this.options.tipUnit ?? this.options.unit;
    const shown = (value) => `${this.options.yText(value)}${unit ? ` ${unit}` : ""}`;
    if (this.data.stack) {
      const { rows, names, colors } = this.data.stack;
      const row = rows.find(([x0, x1]) => x >= x0 && x <= x1);
      return names.map((name, i) => [name, shown(row[2][i]), colors[i]]).filter((_, i) => row[2][i] > 0).reverse();
    }
    return this.data.lines
      .filter((line) => line.points.length)
      .map((line) => {
        const found = nearest(line.points.map((point) => point[0]), x);
        return [line.name || this.options.label, shown(line.points.find((point) => point[0] === found)[1]), line.color];
      });
  }
}

function nearest(sorted, x) {
  let best = sorted[0];
  for (const one of sorted) if (Math.abs(one - x) < Math.abs(best - x)) best = one;
  return best;
}

function middle(values) {
  return [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)] ?? 0;
}

function extent(values) {
  return values.length ? [values[0], values[values.length - 1]] : [0, 1];
}

/** Labels at the right end of what they name, moved apart where they would overlap. */
function placed(labels, inner) {
  const sorted = labels.map((label) => ({ ...label })).sort((a, b) => a.y - b.y);
  sorted.forEach((label, i) => {
    if (i) label.y = Math.max(label.y, sorted[i - 1].y + LABEL_PX);
  });
  const over = sorted.length ? sorted[sorted.length - 1].y - inner.y0 : 0;
  if (over > 0) for (let i = sorted.length - 1, most = inner.y0; i >= 0; i--, most -= LABEL_PX) sorted[i].y = Math.min(sorted[i].y, most);
  return sorted.map(
    (label) => `<text class="label" x="${inner.x1 + 5}" y="${label.y.toFixed(1)}" dy="0.32em" fill="var(--${label.color}-text, var(--${label.color}))">${escaped(label.name)}</text>`,
  );
}
