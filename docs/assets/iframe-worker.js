// Chromium starts no worker from a page that was opened from a disk, and the search is one. There a
// frame stands in: it runs the worker's script, and passes messages between it and the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise((resolve) => {
        const script = inner.document.createElement("script");
        script.onload = () => resolve(inner);
        script.src = url;
        inner.document.body.append(script);
      });
    }

    postMessage(data) {
      this.loaded.then((inner) => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
    }
  };
}
