"use strict";
// Draws the panels of a heatmap page from its embedded data, and lights up the tokens of the cell under the pointer.
(() => {
  const heatmap = JSON.parse(document.getElementById("heatmap").textContent);
  const minus = (text) => text.replace("-", "−");
  const number = (value) => minus(Math.abs(value) >= 0.1 || value === 0 ? value.toFixed(3) : value.toPrecision(3));
  const signed = (value) => (value >= 0 ? "+" : "") + number(value);
  // plotly reads a little markup in its labels, and mathematics between dollar signs
  const entities = { "&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;" };
  const escape = (text) => text.replace(/[&<>$]/g, (character) => entities[character]);
  const shorten = (text, limit) => (text.length > limit ? text.slice(0, limit - 1) + "…" : text);
  const labels = heatmap.columns.map((column) => escape(shorten(column.label, 22)));
  const longest = Math.max(...heatmap.columns.map((column) => Math.min(column.label.length, 22)));
  const way = heatmap.clean - heatmap.corrupt;

  function hover(panel, row, column) {
    const value = panel.values[row][column];
    if (value === null) return "";
    const where = heatmap.columns[column];
    const lines = [
      `<b>${escape(panel.names[row])}</b> @ <b>${escape(shorten(where.label, 60))}</b>`,
      panel.rows[row] === null ? "no layer" : `layer ${panel.rows[row]}`,
      `clean position ${where.clean_text} → corrupt position ${where.corrupt_text}`,
      `${heatmap.metric}: ${number(value)}`,
      `effect over baseline: ${signed(value - heatmap.corrupt)}`,
    ];
    if (way !== 0) lines.push(`recovered: ${minus((100 * (value - heatmap.corrupt) / way).toFixed(1))} %`);
    return lines.join("<br>");
  }

  function outline(spot) {
    const box = { type: "rect", x0: spot.column - 0.5, x1: spot.column + 0.5, y0: spot.row - 0.5, y1: spot.row + 0.5 };
    return [{ ...box, line: { color: "white", width: 5 } }, { ...box, line: { color: "black", width: 2.5 } }];
  }

  function layersShown(rows, height) {
    const every = [1, 2, 4, 5, 10].find((n) => n * height >= 15) ?? 20;
    return rows.map((_, i) => i).filter((i) => i % every === 0);
  }

  // every panel has its place before the first is drawn, for a drawing takes its width from there
  function place(panel) {
    const holder = document.createElement("div"), heading = document.createElement("h3");
    const scroll = document.createElement("div"), plot = document.createElement("div");
    holder.className = "panel";
    scroll.className = "scroll";
    heading.textContent = panel.site;
    plot.style.minWidth = `${heatmap.columns.length * 17 + 70}px`;
    holder.append(heading, scroll);
    scroll.append(plot);
    document.getElementById("panels").append(holder);
    return plot;
  }

  function traces(panel, height) {
    const at = { type: "heatmap", x: heatmap.columns.map((_, i) => i), y: panel.rows.map((_, i) => i),
                 xgap: 1, ygap: height > 12 ? 1 : 0, hoverongaps: false, showscale: false };
    const cells = {
      ...at, z: panel.values, zmin: heatmap.scale.low, zmax: heatmap.scale.high, colorscale: heatmap.scale.colours,
      hoverinfo: "text", text: panel.values.map((line, row) => line.map((_, column) => hover(panel, row, column))),
    };
    const missing = panel.values.map((line) => line.map((value) => (value === null ? 1 : null)));
    const crosses = missing.map((line) => line.map((value) => (value === null ? "" : "×")));
    const blank = {
      ...at, z: missing, text: crosses, zmin: 0, zmax: 1, colorscale: [[0, heatmap.scale.blank], [1, heatmap.scale.blank]],
      hoverinfo: "skip", texttemplate: "%{text}", textfont: { color: "#9aa4b1", size: 10 },
    };
    return missing.flat().some((value) => value !== null) ? [cells, blank] : [cells];
  }

  function layout(panel, index, height, width) {
    const rows = panel.rows.length, columns = heatmap.columns.length, layered = panel.rows[0] !== null;
    const flat = (width - 60) / columns > longest * 8 + 6;
    const bottom = (flat ? 22 : Math.min(longest * 5, 110) + 12) + 34;
    const shown = layersShown(panel.rows, height);
    const axis = { showgrid: false, zeroline: false, ticks: "" };
    const name = (text) => ({ text, font: { size: 12, color: "#5f6b7a" }, standoff: 6 });
    return {
      height: rows * height + bottom + 32, margin: { l: 46, r: 8, t: 32, b: bottom },
      paper_bgcolor: "white", plot_bgcolor: "white",
      font: { family: "system-ui, Segoe UI, Roboto, Arial, sans-serif", size: 12, color: "#1f2933" },
      xaxis: { ...axis, range: [-0.5, columns - 0.5], tickvals: heatmap.columns.map((_, i) => i), ticktext: labels,
               tickangle: flat ? 0 : -45, title: name("token of the corrupt prompt") },
      yaxis: { ...axis, range: [-0.5, rows - 0.5], tickvals: layered ? shown : [],
               ticktext: shown.map((i) => String(panel.rows[i])), title: name(layered ? "layer" : "") },
      shapes: heatmap.best && heatmap.best.panel === index ? outline(heatmap.best) : [],
      hoverlabel: { bgcolor: "white", bordercolor: "#5f6b7a", align: "left", namelength: 0,
                    font: { family: "system-ui, Segoe UI, Roboto, DejaVu Sans, sans-serif", color: "#1f2933", size: 13 } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: "#b4bcc7", activecolor: "#5f6b7a" },
    };
  }

  function draw(plot, index) {
    const panel = heatmap.panels[index], height = Math.min(Math.max(480 / panel.rows.length, 8), 34);
    const buttons = ["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"];
    const options = { responsive: true, displaylogo: false, modeBarButtons: [buttons] };
    Plotly.newPlot(plot, traces(panel, height), layout(panel, index, height, plot.clientWidth), options).then(() => {
      plot.on("plotly_hover", (event) => light(heatmap.columns[event.points[0].x]));
      plot.on("plotly_unhover", () => light(null));
    });
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
  heatmap.panels.map(place).forEach(draw);
})();
