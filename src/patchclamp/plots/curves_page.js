"use strict";
// Draws the charts of a page of curves from its embedded data, and shows the numbers under the pointer.
(() => {
  const curves = JSON.parse(document.getElementById("curves").textContent);
  const WIDTH = 560, HEIGHT = 320, LEFT = 62, RIGHT = 14, TOP = 12, BOTTOM = 58;
  const SVG = "http://www.w3.org/2000/svg";
  const DASHES = ["", "7 4", "9 3 2 3", "2 3"];
  const RULE = getComputedStyle(document.documentElement).getPropertyValue("--rule");
  const MUTED = getComputedStyle(document.documentElement).getPropertyValue("--muted");

  function add(parent, name, attributes, text) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }

  // -- axes

  const first = curves.places[0], last = curves.places[curves.places.length - 1];
  const margin = 0.03 * (last - first) || 0.5;
  const across = (place) => LEFT + (WIDTH - LEFT - RIGHT) * (place - first + margin) / (last - first + 2 * margin);

  function upwards(chart) {
    const [low, high] = chart.y_log ? chart.span.map(Math.log10) : chart.span;
    return (value) => {
      const at = chart.y_log ? Math.log10(Math.max(value, chart.span[0])) : Math.min(Math.max(value, low), high);
      return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (Math.min(at, high) - low) / (high - low);
    };
  }

  function marks(chart) {
    const [low, high] = chart.span;
    const marked = [];
    if (chart.y_log) {
      const factors = Math.log10(high / low) > 2 ? [1] : [1, 2, 5];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
        for (const factor of factors) marked.push(factor * 10 ** power);
      }
      return marked.filter((value) => value >= low && value <= high);
    }
    const rough = (high - low) / 5, unit = 10 ** Math.floor(Math.log10(rough));
    const step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough * 0.9);
    for (let n = Math.ceil(low / step); n * step <= high; n++) marked.push(n * step);
    return marked;
  }

  const text = (value) => {
    const short = Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-4)
      ? value.toExponential(0).replace("e", " × 10^").replace("^+", "^") : String(+value.toPrecision(4));
    return short.replaceAll("-", "−");
  };

  function frame(svg, chart, up) {
    for (const value of marks(chart)) {
      const y = up(value);
      add(svg, "line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y, stroke: RULE });
      add(svg, "text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, text(value));
    }
    const base = HEIGHT - BOTTOM;
    add(svg, "line", { x1: LEFT, x2: WIDTH - RIGHT, y1: base, y2: base, stroke: MUTED });
    for (const [place, label] of curves.ticks) {
      add(svg, "line", { x1: across(place), x2: across(place), y1: base, y2: base + 4, stroke: MUTED });
      add(svg, "text", { x: across(place), y: base + 18, "text-anchor": "middle" }, label);
    }
    if (curves.gap !== null) {
      add(svg, "rect", { x: across(curves.gap) - 5, y: base - 2, width: 10, height: 4, fill: "white" });
      add(svg, "text", { class: "muted", x: across(curves.gap), y: base + 4, "text-anchor": "middle" }, "//");
    }
    const middle = (LEFT + WIDTH - RIGHT) / 2;
    add(svg, "text", { class: "muted", x: middle, y: HEIGHT - 14, "text-anchor": "middle" }, curves.x_label);
    const turned = `translate(14 ${(TOP + base) / 2}) rotate(-90)`;
    add(svg, "text", { class: "muted", transform: turned, "text-anchor": "middle" }, chart.y_label);
  }

  // -- lines

  function stretches(line) {
    // numbers of the points between gaps
    const parts = [[]];
    line.y.forEach((y, n) => (y === null ? parts.push([]) : parts[parts.length - 1].push(n)));
    return parts.filter((part) => part.length);
  }

  function drawLine(svg, line, number, up) {
    for (const part of stretches(line)) {
      const point = (n, side) => `${across(line.x[n]).toFixed(2)},${up(side[n]).toFixed(2)}`;
      if (line.low) {
        const outline = [...part.map((n) => point(n, line.high)), ...part.toReversed().map((n) => point(n, line.low))];
        add(svg, "polygon", { points: outline.join(" "), fill: line.colour, "fill-opacity": 0.16 });
      }
      const path = { points: part.map((n) => point(n, line.y)).join(" "), fill: "none", stroke: line.colour };
      add(svg, "polyline", { ...path, "stroke-width": 2, "stroke-dasharray": DASHES[number % DASHES.length] });
      for (const n of part) {
        const dot = { cx: across(line.x[n]), cy: up(line.y[n]), r: 3.2, fill: line.colour, stroke: "white" };
        add(svg, "circle", dot);
      }
    }
  }

  function drawLevel(svg, chart, up) {
    if (chart.level === null) return;
    const y = up(chart.level);
    add(svg, "line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y, stroke: MUTED, "stroke-dasharray": "5 4" });
  }

  // -- the numbers under the pointer

  function tipFor(chart, n) {
    const tip = document.createElement("div");
    tip.className = "tip";
    const heading = document.createElement("b");
    heading.textContent = `${curves.x_label} ${curves.x_texts[n]}`;
    tip.append(heading);
    for (const line of chart.lines) {
      const at = line.x.indexOf(curves.places[n]);
      if (at < 0) continue;
      const row = document.createElement("div");
      row.textContent = `${line.label}: ${line.texts[at]}`;
      row.style.color = line.colour;
      tip.append(row);
    }
    return tip;
  }

  function follow(holder, svg, chart) {
    const cursor = add(svg, "line", { y1: TOP, y2: HEIGHT - BOTTOM, stroke: MUTED, visibility: "hidden" });
    let tip = null;
    const hide = () => { tip?.remove(); tip = null; cursor.setAttribute("visibility", "hidden"); };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) * WIDTH / box.width;
      const distances = curves.places.map((place) => Math.abs(across(place) - x));
      const n = distances.indexOf(Math.min(...distances)), at = across(curves.places[n]);
      hide();
      for (const end of ["x1", "x2"]) cursor.setAttribute(end, at);
      cursor.setAttribute("visibility", "visible");
      tip = tipFor(chart, n);
      holder.append(tip);
      const left = at * box.width / WIDTH;
      const beside = left + 12 + tip.offsetWidth <= box.width ? left + 12 : left - 12 - tip.offsetWidth;
      tip.style.left = `${Math.max(beside, 0)}px`;
      tip.style.top = "16px";
    });
    svg.addEventListener("pointerleave", hide);
  }

  curves.charts.forEach((chart, number) => {
    const holder = document.getElementById(`chart-${number}`), up = upwards(chart);
    const svg = add(holder, "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}` });
    frame(svg, chart, up);
    drawLevel(svg, chart, up);
    chart.lines.forEach((line, n) => drawLine(svg, line, n, up));
    follow(holder, svg, chart);
  });
})();
