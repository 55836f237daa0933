"use strict";
// Unpacks plotly, draws the figures, and keeps them in the colours of the page and on one range of steps.
(async () => {
  const text = (id) => document.getElementById(id).textContent;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 640px)");
  const coarse = matchMedia("(pointer: coarse)");
  const status = document.getElementById("status");

  const unpacked = async (packed) => {
    const bytes = Uint8Array.from(atob(packed.trim()), (sign) => sign.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  };
  try {
    const script = document.createElement("script");
    script.textContent = await unpacked(text("plotly"));
    document.head.append(script);
    if (!window.Plotly) throw new Error("its script did not run");
  } catch (error) {
    status.textContent = `This browser cannot unpack the charts (${error.message}); the tables have what they show.`;
    status.hidden = false;
    document.documentElement.classList.add("chartless");
    return;
  }

  const figures = JSON.parse(text("figures"));
  const whole = figures.map((figure) => figure.layout.xaxis.range);
  const logs = figures.map((figure) => figure.layout.yaxis.type === "log");
  const divs = figures.map((figure) => document.getElementById(figure.id));
  let zoomed = null; // the range of steps, where it is not the whole run
  let linking = false;

  // "var(--name)" as what the style says now, in whatever is a colour.
  const coloured = (value, style, isColor) => {
    if (Array.isArray(value)) return value.map((item) => coloured(item, style, isColor));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, item]) =>
        [key, coloured(item, style, /color(scale)?$/.test(key))]));
    const name = isColor && typeof value === "string" && /^var\((--[\w-]+)\)$/.exec(value);
    return name ? style.getPropertyValue(name[1]).trim() : value;
  };

  const axis = (grid, line) => ({
    gridcolor: grid, zerolinecolor: grid, linecolor: line, tickcolor: line, zeroline: false, showline: true,
  });

  const scaled = (index) => logs[index]
    ? { type: "log", ...figures[index].layout.meta.log }
    : { type: "linear", ...Object.fromEntries(Object.keys(figures[index].layout.meta.log).map((key) => [key, null])) };

  // Those with room between them on a narrow screen, among those of the same height.
  const apart = (annotations, range) => {
    const last = {};
    return annotations.filter(({ x, y, text }) => {
      if (x - last[y] <= 0.03 * (text.length + 1) * (range[1] - range[0])) return false;
      last[y] = x;
      return true;
    });
  };

  // Of the ticks beside each other in a colour bar, the first and the last have room on a narrow screen.
  const ends = ({ colorbar, ...trace }) => {
    if (!colorbar || !narrow.matches) return colorbar ? { ...trace, colorbar } : trace;
    const { tickvals, ticktext } = colorbar;
    return { ...trace, colorbar: { ...colorbar, tickangle: 0,
      tickvals: [tickvals[0], tickvals.at(-1)], ticktext: [ticktext[0], ticktext.at(-1)] } };
  };

  const titled = ({ title }) => ({ standoff: 6, ...title, font: { size: 14 } });

  const layoutOf = (index, style) => {
    const own = coloured(figures[index].layout, style, false);
    const color = (name) => style.getPropertyValue(name).trim();
    const lines = axis(color("--grid"), color("--line"));
    const layout = {
      height: narrow.matches ? 300 : 330, ...own,
      margin: { l: narrow.matches ? 46 : 68, r: narrow.matches ? 8 : 16, t: 50, b: 54 },
      font: { family: style.fontFamily, size: 14, color: color("--muted") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: {
        bgcolor: color("--card"), bordercolor: color("--line"), align: "left", namelength: -1,
        font: { family: style.fontFamily, size: 14, color: color("--fg") },
      },
      hovermode: own.hovermode || "closest", hoverdistance: 40, showlegend: false,
      dragmode: coarse.matches ? false : "zoom", modebar: {
        bgcolor: "rgba(0,0,0,0)", color: color("--muted"), activecolor: color("--fg"),
      },
      xaxis: { ...lines, ...own.xaxis, title: titled(own.xaxis) },
      yaxis: { ...lines, ...own.yaxis, title: titled(own.yaxis) },
    };
    if (own.meta.heat) {
      layout.margin.t = 70;
      layout.plot_bgcolor = color("--empty");
      if (narrow.matches) {
        layout.yaxis.ticktext = own.meta.narrow;
        layout.xaxis.nticks = 3;
      }
    }
    if (own.meta.steps && zoomed) layout.xaxis.range = [...zoomed];
    if (own.meta.steps && narrow.matches) layout.xaxis.nticks = 5;
    if (own.meta.log) Object.assign(layout.yaxis, scaled(index));
    if (narrow.matches && own.annotations) layout.annotations = apart(own.annotations, layout.xaxis.range);
    return layout;
  };

  const config = {
    displaylogo: false, responsive: true, doubleClick: false,
    displayModeBar: "hover", showSendToCloud: false,
    modeBarButtons: [coarse.matches ? ["zoomIn2d", "zoomOut2d", "resetScale2d"]
      : ["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
  };

  const draw = async (index) => {
    const style = getComputedStyle(document.documentElement);
    await Plotly.react(divs[index], coloured(figures[index].data, style, false).map(ends), layoutOf(index, style), config);
  };

  const link = async (from, range) => {
    if (linking) return;
    linking = true;
    zoomed = range;
    await Promise.all(figures.map((figure, index) =>
      figure.layout.meta.steps && index !== from ? Plotly.relayout(divs[index], { "xaxis.range": [...(range || whole[index])] }) : null));
    linking = false;
  };

  const listen = (index) => {
    const div = divs[index], own = figures[index].layout;
    div.on("plotly_relayout", (change) => {
      if (!linking && own.meta.steps && Object.keys(change).some((key) => key.startsWith("xaxis")))
        link(index, [...div.layout.xaxis.range]);
    });
    div.on("plotly_doubleclick", async () => {
      const back = own.xaxis.range ? { "xaxis.range": [...own.xaxis.range] } : { "xaxis.autorange": true };
      if (own.yaxis.range) back["yaxis.range"] = [...own.yaxis.range];
      else back["yaxis.autorange"] = own.yaxis.autorange || true;
      if (own.meta.steps) await link(index, null);
      linking = true;
      await Plotly.relayout(div, back);
      linking = false;
    });
    const button = document.querySelector(`button[data-log="${figures[index].id}"]`);
    if (button) {
      button.hidden = false;
      button.addEventListener("click", async () => {
        logs[index] = !logs[index];
        button.setAttribute("aria-pressed", logs[index]);
        const axis = Object.entries(scaled(index)).map(([key, value]) => [`yaxis.${key}`, value]);
        await Plotly.relayout(div, { ...Object.fromEntries(axis), "yaxis.autorange": true });
      });
    }
  };

  const redraw = () => figures.forEach((_, index) => draw(index));
  for (let index = 0; index < figures.length; index++) {
    await draw(index);
    listen(index);
  }
  dark.addEventListener("change", redraw);
  narrow.addEventListener("change", redraw);
  document.documentElement.dataset.drawn = figures.length;
})();
