"use strict";
// Draws every figure from the data block of the same name, in the colours that the style sheet says now.
(function () {
  const root = document.documentElement;
  const blocks = Array.from(document.querySelectorAll("script[data-figure]"));
  // A drag on a touch screen scrolls the page; only a mouse zooms.
  const dragmode = window.matchMedia("(pointer: fine)").matches ? "zoom" : false;

  function color(name) {
    const value = getComputedStyle(root).getPropertyValue(name).trim();
    const again = value.match(/^var\((--[\w-]+)\)$/);
    return again ? color(again[1]) : value;
  }

  function colored(node) {
    if (typeof node === "string") {
      const named = node.match(/^var\((--[\w-]+)\)$/);
      return named ? color(named[1]) : node;
    }
    if (Array.isArray(node)) return node.map(colored);
    if (node && typeof node === "object") {
      return Object.fromEntries(Object.entries(node).map(([key, value]) => [key, colored(value)]));
    }
    return node;
  }

  function draw(width) {
    for (const block of blocks) {
      const figure = JSON.parse(block.textContent);
      const target = document.getElementById("figure-" + block.dataset.figure);
      const layout = colored(figure.layout);
      layout.dragmode = dragmode;
      layout.height = target.clientHeight;
      if (width) layout.width = Math.min(width, target.clientWidth || width);
      Plotly.react(target, colored(figure.data), layout, { displayModeBar: false, responsive: !width, showTips: false });
    }
  }

  draw();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  window.addEventListener("beforeprint", () => { root.dataset.print = ""; draw(680); });
  window.addEventListener("afterprint", () => { delete root.dataset.print; draw(); });
})();
