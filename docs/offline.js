/* Lets the search work in pages that are opened as files, where a browser starts no worker: a hidden frame runs it. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      this.inside = frame.contentWindow;
      const base = new URL(url, document.baseURI);
      const load = (source) =>
        new Promise((loaded, failed) => {
          const script = frame.contentDocument.createElement("script");
          Object.assign(script, { src: new URL(source, base).href, onload: loaded, onerror: failed });
          frame.contentDocument.head.append(script);
        });
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside.importScripts = (...sources) => Promise.all(sources.map(load));
      this.started = load(base);
    }

    postMessage(data) {
      this.started.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
