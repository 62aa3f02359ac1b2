"use strict";
// The interactive curves. The data say what was measured; the state, what of it is shown.
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const plot = document.getElementById("curves");
  const controls = document.getElementById("controls");
  const AXES = {
    rounds: "rounds",
    gib: "communication, GiB",
    whole_gib: "communication, GiB, with models sent whole",
    seconds: "measured time of the simulation, s",
    memory: "client's memory in a step, MB",
    flops: "client's FLOPs in a step, 10⁹",
  };
  const POINTS = ["memory", "flops"];  // one number for a whole series: the best value of any round stands over it
  const state = { metric: 0, x: "gib", xScale: "linear", yScale: "linear", by: "algorithm", setting: 0, algorithm: 0 };

  const dark = matchMedia("screen and (prefers-color-scheme: dark)");

  function colour(name) {  // of the page, by its name in the style sheet
    return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  }

  function lit(hex) {  // a line's colour, lighter where the ground is dark
    if (!dark.matches) return hex;
    const part = (place) => Math.round(parseInt(hex.slice(place, place + 2), 16) * 0.7 + 255 * 0.3);
    return "#" + [1, 3, 5].map((place) => part(place).toString(16).padStart(2, "0")).join("");
  }

  const hidden = new Set();  // names that the reader has put away, also while another metric does without them

  function visible(style) {
    return hidden.has(style.name) ? "legendonly" : true;
  }

  function remember() {
    for (const trace of plot.data) {
      if (trace.visible === "legendonly") hidden.add(trace.legendgroup);
      else hidden.delete(trace.legendgroup);
    }
  }

  function shown() {
    const fixed = state.by === "algorithm"
      ? (one) => one.settings.includes(state.setting)
      : (one) => one.algorithm === state.algorithm;
    const key = data.metrics[state.metric].key;
    const there = (one) => !POINTS.includes(state.x) || (one[state.x] !== null && one.values[key].best);
    return data.series.filter((one) => fixed(one) && one.values[key] && there(one));
  }

  function look(one, place, count) {
    const algorithm = data.algorithms[one.algorithm];
    if (state.by === "algorithm") return { name: algorithm.name, colour: lit(algorithm.colour), dash: algorithm.dash };
    const shades = data.shades;
    const shade = shades[count < 2 ? 0 : Math.round((place * (shades.length - 1)) / (count - 1))];
    return { name: one.label || algorithm.name, colour: lit(shade), dash: "solid" };
  }

  function band(one, values, style) {
    const upper = values.mean.map((mean, i) => (mean === null ? null : mean + values.std[i]));
    const lower = values.mean.map((mean, i) => (mean === null ? null : mean - values.std[i]));
    const x = one[state.x];
    return {
      type: "scatter", mode: "lines", x: x.concat(x.slice().reverse()), y: upper.concat(lower.slice().reverse()),
      fill: "toself", fillcolor: style.colour + "26", line: { width: 0 }, hoverinfo: "skip", showlegend: false,
      legendgroup: style.name, name: style.name + " spread", uid: style.name + " spread", visible: visible(style),
    };
  }

  function line(one, values, style) {
    const unit = data.metrics[state.metric].unit;
    const seeds = one.seeds > 1 ? " ± %{customdata[3]:.3~f} " + unit + " (" + one.seeds + " seeds)" : " " + unit;
    return {
      type: "scatter", mode: one.rounds.length > 60 ? "lines" : "lines+markers", x: one[state.x], y: values.mean,
      customdata: one.rounds.map((round, i) => [round, one.gib[i], one.seconds[i], values.std[i]]),
      line: { color: style.colour, width: 2.5, dash: style.dash }, marker: { size: 6 }, legendgroup: style.name,
      name: style.name, uid: style.name, visible: visible(style),
      hovertemplate: "<b>" + style.name + "</b><br>%{y:.4~g}" + seeds +
        "<br>round %{customdata[0]}, %{customdata[1]:.3~f} GiB, %{customdata[2]:.0f} s<extra></extra>",
    };
  }

  function point(one, values, style) {
    const unit = data.metrics[state.metric].unit;
    const spread = one.seeds > 1 ? " ± " + values.best[1] + " " + unit + " (" + one.seeds + " seeds)" : " " + unit;
    return {
      type: "scatter", mode: "markers", x: [one[state.x]], y: [values.best[0]],
      error_y: { type: "data", array: [values.best[1]], visible: one.seeds > 1, color: style.colour },
      marker: { size: 13, color: style.colour }, legendgroup: style.name, name: style.name, uid: style.name,
      visible: visible(style),
      hovertemplate: "<b>" + style.name + "</b><br>best %{y:.4~g}" + spread + "<br>" + one.memory + " MB, " +
        one.flops + " GFLOPs a step<extra></extra>",
    };
  }

  function traces() {
    const series = shown();
    const key = data.metrics[state.metric].key;
    const lines = [], bands = [];
    series.forEach((one, place) => {
      const style = look(one, place, series.length);
      if (POINTS.includes(state.x)) return lines.push(point(one, one.values[key], style));
      if (one.seeds > 1) bands.push(band(one, one.values[key], style));
      lines.push(line(one, one.values[key], style));
    });
    return bands.concat(lines);
  }

  function layout() {
    const metric = data.metrics[state.metric];
    const view = JSON.stringify(state);
    const axis = {
      gridcolor: colour("line"), linecolor: colour("axis"), zeroline: false, ticks: "outside",
      tickcolor: colour("axis"),
      automargin: true, uirevision: view,
    };
    return {
      font: { family: getComputedStyle(document.body).fontFamily, size: 14, color: colour("ink") },
      paper_bgcolor: colour("paper"), plot_bgcolor: colour("paper"), margin: { l: 64, r: 16, t: 16, b: 56 }, hovermode: "closest",
      hoverlabel: { bgcolor: colour("paper"), bordercolor: colour("axis"), font: { color: colour("ink") } },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 14 } },
      xaxis: { ...axis, type: state.xScale, title: { text: AXES[state.x] } },
      yaxis: { ...axis, type: state.yScale, title: { text: metric.unit ? metric.label + ", " + metric.unit : metric.label } },
      uirevision: state.by + (state.by === "algorithm" ? "" : state.algorithm),
    };
  }

  function draw() {
    return Plotly.react(plot, traces(), layout(), {
      responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
      toImageButtonOptions: { format: "png", scale: 3, filename: "fsl-sage-curves" },
    });
  }

  function buttons(title, name, choices) {
    const group = document.createElement("fieldset");
    const row = document.createElement("div");
    group.append(Object.assign(document.createElement("legend"), { textContent: title }), row);
    row.className = "buttons";
    for (const [value, text] of choices) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: text });
      button.dataset.set = name;
      button.dataset.value = value;
      button.addEventListener("click", () => { state[name] = value; refresh(); });
      row.append(button);
    }
    controls.append(group);
  }

  function choice(title, name, texts, when) {
    const label = document.createElement("label");
    const select = document.createElement("select");
    label.append(Object.assign(document.createElement("span"), { textContent: title }), select);
    label.dataset.when = when;
    select.dataset.set = name;
    texts.forEach((text, value) => select.append(new Option(text, value)));
    select.addEventListener("change", () => { state[name] = Number(select.value); refresh(); });
    controls.append(label);
  }

  function refresh() {
    controls.querySelectorAll("button").forEach((button) => {
      button.setAttribute("aria-pressed", String(String(state[button.dataset.set]) === String(button.dataset.value)));
    });
    controls.querySelectorAll("[data-when]").forEach((label) => { label.hidden = label.dataset.when !== state.by; });
    draw();
  }

  if (data.metrics.length > 1) buttons("shown", "metric", data.metrics.map((metric, place) => [place, metric.short]));
  const whole = data.frozen ? [["whole_gib", "GiB, whole models"]] : [];
  const steps = data.series.some((one) => one.memory !== null)
    ? [["memory", "client's memory"], ["flops", "client's FLOPs"]] : [];
  buttons("x-axis", "x", [["gib", "GiB"], ...whole, ["rounds", "rounds"], ["seconds", "time"], ...steps]);
  buttons("x scale", "xScale", [["linear", "linear"], ["log", "log"]]);
  buttons("y scale", "yScale", [["linear", "linear"], ["log", "log"]]);
  if (data.settings.length > 1) {
    buttons("lines", "by", [["algorithm", "algorithms"], ["setting", "settings"]]);
    choice("setting", "setting", data.settings, "algorithm");
    choice("algorithm", "algorithm", data.algorithms.map((algorithm) => algorithm.name), "setting");
  }
  refresh();
  plot.on("plotly_restyle", remember);
  dark.addEventListener("change", draw);
})();
