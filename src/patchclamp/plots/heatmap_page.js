"use strict";
// Draws the panels of a heatmap page on canvases from its embedded data, and tells of the cell under the pointer.
(() => {
  const heatmap = JSON.parse(document.getElementById("heatmap").textContent);
  const told = document.getElementById("told");
  const FONT = 'system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif', INK = "#1f2933", MUTED = "#5f6b7a";
  const LEFT = 46, TOP = 6, RIGHT = 10, LABEL = 22;
  const minus = (text) => text.replace("-", "−");
  const number = (value) => minus(Math.abs(value) >= 0.1 || value === 0 ? value.toFixed(3) : value.toPrecision(3));
  const signed = (value) => (value >= 0 ? "+" : "") + number(value);
  const shorten = (text, limit) => (text.length > limit ? text.slice(0, limit - 1) + "…" : text);
  const labels = heatmap.columns.map((column) => shorten(column.label, LABEL));
  const channels = heatmap.scale.colours.map((colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)));

  function colour(value) {
    const { low, high } = heatmap.scale;
    const at = Math.min(Math.max((value - low) / (high - low), 0), 1) * (channels.length - 1);
    const stop = Math.min(Math.floor(at), channels.length - 2), part = at - stop;
    return `rgb(${channels[stop].map((from, i) => Math.round(from + part * (channels[stop + 1][i] - from))).join()})`;
  }

  function lines(panel, row, column) {
    const value = panel.values[row][column], where = heatmap.columns[column];
    const [place, label] = panel.part_of ? [`${panel.part_of[0]}[${panel.rows[row]}, ${where.label}]`, panel.part_of[1]]
      : [panel.names[row], where.label];
    const head = [`${place} @ ${shorten(label, 60)}`, ...(where.positions ? [where.positions] : [])];
    if (value === null) {
      const of = panel.coarse && panel.coarse[row][column];
      return of === null ? [...head, "was not run"] : [...head, `its block together: ${number(of)}`];
    }
    const effect = value - heatmap.baseline, way = heatmap.goal === null ? 0 : heatmap.goal.value - heatmap.baseline;
    const more = [`${heatmap.metric}: ${number(value)}`, `effect over baseline: ${signed(effect)}`];
    if (way !== 0) more.push(`of the way to ${heatmap.goal.name}: ${minus((100 * effect / way).toFixed(1))} %`);
    for (const [name, numbers] of panel.details)
      if (numbers[row][column] !== null) more.push(`${name}: ${number(numbers[row][column])}`);
    if (panel.faint[row].includes(column)) more.push("not above the noise floor");
    return [...head, ...more];
  }

  // Sizes in CSS pixels. Row 0 is at the bottom.
  function measure(panel, width, pen) {
    pen.font = `12px ${FONT}`;
    const rows = panel.rows.length, columns = labels.length;
    const longest = Math.max(...labels.map((label) => pen.measureText(label).width));
    const across = Math.max((width - LEFT - RIGHT) / columns, 15), down = Math.min(Math.max(480 / rows, 8), 34);
    const flat = longest + 8 < across;
    const below = (flat ? 20 : Math.min(longest * 0.72 + 12, 120)) + 24;
    return { rows, columns, across, down, flat, width: LEFT + across * columns + RIGHT, height: TOP + down * rows + below };
  }

  function cells(pen, panel, size) {
    const gap = Math.min(size.across, size.down) > 9 ? 1 : 0;
    panel.values.forEach((line, row) => line.forEach((value, column) => {
      const coarse = panel.coarse && panel.coarse[row][column], shown = value === null ? coarse : value;
      const x = LEFT + column * size.across, y = TOP + (size.rows - 1 - row) * size.down;
      pen.globalAlpha = value === null && shown !== null ? heatmap.scale.pale : 1;
      pen.fillStyle = shown === null ? heatmap.scale.blank : colour(shown);
      pen.fillRect(x, y, size.across - gap, size.down - gap);
      pen.globalAlpha = 1;
      if (shown === null) mark(pen, "×", x + size.across / 2, y + size.down / 2, Math.min(size.down, 11));
      else if (panel.faint[row].includes(column)) dot(pen, x + size.across / 2, y + size.down / 2, Math.min(size.across, size.down));
    }));
  }

  function dot(pen, x, y, room) {
    pen.fillStyle = heatmap.scale.faint;
    pen.beginPath();
    pen.arc(x, y, Math.min(Math.max(room / 12, 0.8), 1.8), 0, 2 * Math.PI);
    pen.fill();
  }

  function mark(pen, text, x, y, size) {
    pen.fillStyle = heatmap.scale.faint;
    pen.font = `${size}px ${FONT}`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.fillText(text, x, y);
  }

  function axes(pen, panel, size) {
    const every = [1, 2, 4, 5, 10].find((n) => n * size.down >= 15) ?? 20, bottom = TOP + size.rows * size.down;
    pen.font = `12px ${FONT}`;
    pen.fillStyle = INK;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    panel.rows.forEach((layer, row) => {
      if (layer !== null && row % every === 0) pen.fillText(String(layer), LEFT - 6, TOP + (size.rows - row - 0.5) * size.down);
    });
    labels.forEach((label, column) => {
      pen.save();
      pen.translate(LEFT + (column + 0.5) * size.across, bottom + (size.flat ? 12 : 7));
      pen.textAlign = size.flat ? "center" : "right";
      if (!size.flat) pen.rotate(-Math.PI / 4);
      pen.fillText(label, 0, 0);
      pen.restore();
    });
    pen.fillStyle = MUTED;
    pen.textAlign = "center";
    pen.fillText(heatmap.axis, LEFT + size.across * size.columns / 2, size.height - 9);
    if (panel.rows[0] !== null) sideways(pen, "layer", 9, TOP + size.rows * size.down / 2);
  }

  function sideways(pen, text, x, y) {
    pen.save();
    pen.translate(x, y);
    pen.rotate(-Math.PI / 2);
    pen.fillText(text, 0, 0);
    pen.restore();
  }

  function outline(pen, spot, size) {
    const box = [LEFT + spot.column * size.across, TOP + (size.rows - 1 - spot.row) * size.down, size.across, size.down];
    for (const [style, width] of [["white", 5], ["black", 2.5]]) {
      pen.strokeStyle = style;
      pen.lineWidth = width;
      pen.strokeRect(...box);
    }
  }

  function draw(view, index) {
    const { panel, canvas, scroll } = view, pen = canvas.getContext("2d"), dense = window.devicePixelRatio || 1;
    const size = (view.size = measure(panel, scroll.clientWidth, pen));
    canvas.width = Math.round(size.width * dense);
    canvas.height = Math.round(size.height * dense);
    canvas.style.width = `${size.width}px`;
    canvas.style.height = `${size.height}px`;
    pen.setTransform(dense, 0, 0, dense, 0, 0);
    pen.fillStyle = "white";
    pen.fillRect(0, 0, size.width, size.height);
    cells(pen, panel, size);
    axes(pen, panel, size);
    if (heatmap.best && heatmap.best.panel === index) outline(pen, heatmap.best, size);
  }

  function under(view, event) {
    const box = view.canvas.getBoundingClientRect(), size = view.size;
    const column = Math.floor((event.clientX - box.left - LEFT) / size.across);
    const row = size.rows - 1 - Math.floor((event.clientY - box.top - TOP) / size.down);
    return row >= 0 && row < size.rows && column >= 0 && column < size.columns ? { row, column } : null;
  }

  function tell(view, event) {
    const cell = under(view, event);
    told.hidden = cell === null;
    light(cell && heatmap.columns[cell.column]);
    if (cell === null) return;
    told.textContent = lines(view.panel, cell.row, cell.column).join("\n");
    const right = event.clientX + 16 + told.offsetWidth > document.documentElement.clientWidth;
    told.style.left = `${window.scrollX + (right ? Math.max(event.clientX - told.offsetWidth - 12, 0) : event.clientX + 16)}px`;
    told.style.top = `${window.scrollY + event.clientY + 14}px`;
  }

  function element(kind, className, text) {
    const made = document.createElement(kind);
    made.className = className;
    made.textContent = text;
    return made;
  }

  function save(view) {
    const link = document.createElement("a");
    link.href = view.canvas.toDataURL("image/png");
    link.download = `${view.panel.site.replace(/[^\w.-]+/g, "_")}.png`;
    link.click();
  }

  // every panel has its place before the first is drawn, for a drawing takes its width from there
  function place(panel) {
    const holder = element("div", "panel", ""), heading = document.createElement("header");
    const scroll = element("div", "scroll", ""), canvas = document.createElement("canvas");
    const button = element("button", "", "save as PNG");
    const view = { panel, canvas, scroll };
    heading.append(element("h3", "", panel.site), button);
    holder.append(heading, scroll);
    scroll.append(canvas);
    document.getElementById("panels").append(holder);
    button.addEventListener("click", () => save(view));
    canvas.addEventListener("mousemove", (event) => tell(view, event));
    canvas.addEventListener("mouseleave", () => { told.hidden = true; light(null); });
    return view;
  }

  function light(column) {
    document.querySelectorAll(".token.lit").forEach((token) => token.classList.remove("lit"));
    if (!column) return;
    for (const side of ["clean", "corrupt"])
      for (const position of column[side])
        document.getElementById(`${side}-${position}`)?.classList.add("lit");
    document.querySelectorAll(".tokens").forEach((tokens) => reveal(tokens, tokens.querySelector(".lit")));
  }

  // within a long prompt's own box only: the page stays where it is
  function reveal(tokens, token) {
    if (!token) return;
    const [top, bottom] = [token.offsetTop, token.offsetTop + token.offsetHeight];
    if (top < tokens.scrollTop || bottom > tokens.scrollTop + tokens.clientHeight)
      tokens.scrollTop = top - tokens.clientHeight / 2;
  }

  document.querySelectorAll(".tokens").forEach((tokens) => reveal(tokens, tokens.querySelector(".differs, .skipped")));
  const views = heatmap.panels.map(place);
  views.forEach(draw);
  window.addEventListener("resize", () => views.forEach(draw));
})();
