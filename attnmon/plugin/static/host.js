// What the tab takes from the TensorBoard around it. None of it is documented, so each part may be missing: then the
// colours are those of the system, new data is looked for every half minute, and the link is to the tab alone.

const KEY = "p.attnmon.view"; // TensorBoard's own naming of a plugin's part of the address
const POLL = 30_000;

/** TensorBoard's window, null where the tab is open by itself. */
function around() {
  try {
    return window.parent !== window && window.parent.document ? window.parent : null;
  } catch {
    return null; // of another origin
  }
}

/** Calls `changed(dark)` now and when it changes. */
export function followTheme(changed) {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const body = around()?.document.body;
  const tell = () => changed(body ? body.classList.contains("dark-mode") : system.matches);
  if (body) new MutationObserver(tell).observe(body, { attributes: true, attributeFilter: ["class"] });
  else system.addEventListener("change", tell);
  tell();
}

/** Calls `reload()` when TensorBoard has reloaded; where it can't tell, regularly while the tab can be seen. */
export function followReloads(reload) {
  let told = false;
  if (around()) {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = ({ data }) => {
      let message;
      try {
        message = JSON.parse(data);
      } catch {
        return;
      }
      told = true;
      if (message.isReply) return;
      port1.postMessage(JSON.stringify({ type: message.type, id: message.id, payload: null, error: null, isReply: true }));
      if (message.type === "experimental.DataReloaded") reload();
    };
    window.parent.postMessage("experimental.bootstrap", "*", [port2]);
    // Answered where the channel is understood
    port1.postMessage(
      JSON.stringify({ type: "experimental.GetURLPluginData", id: 0, payload: { pluginName: "attnmon" }, error: null, isReply: false }),
    );
  }
  setInterval(() => {
    if (!told && document.visibilityState === "visible") reload();
  }, POLL);
}

function inHash(hash) {
  for (const part of hash.replace(/^#/, "").split("&")) {
    const [key, value] = part.split("=");
    if (key === KEY && value) {
      try {
        return decodeURIComponent(value);
      } catch {
        return "";
      }
    }
  }
  return "";
}

/**
 * The view to begin with, `{text, linked}`: the address asks for it, the tab's own or TensorBoard's; or it is the one
 * before the page was loaded again, perhaps of another log directory.
 */
export function askedView() {
  const own = inHash(window.location.hash);
  if (own) return { text: own, linked: own !== window.history.state?.attnmon };
  const outer = inHash(around()?.location.hash ?? "");
  return { text: outer || remembered(), linked: Boolean(outer) };
}

/** Calls `changed(text)` when a link is opened in the TensorBoard that is open already. */
export function followAddress(changed) {
  for (const target of new Set([window, around() ?? window])) {
    target.addEventListener("hashchange", () => {
      const asked = inHash(target.location.hash);
      if (asked) changed(asked);
    });
  }
}

function remembered() {
  try {
    return window.sessionStorage.getItem("attnmon.view") ?? "";
  } catch {
    return "";
  }
}

let waiting = null;
let kept = "";

/** Keeps the view in the tab's own address, and over a reload of the page. Not at each move of the slider: browsers mind. */
export function remember(view) {
  kept = view;
  waiting ??= setTimeout(() => {
    waiting = null;
    const { pathname, search } = window.location; // spelled out: the page has another base
    window.history.replaceState({ attnmon: kept }, "", `${pathname}${search}#${KEY}=${encodeURIComponent(kept)}`);
    try {
      window.sessionStorage.setItem("attnmon.view", kept);
    } catch {
      // not allowed here
    }
  }, 250);
}

/** An address that opens this view. */
export function link(view) {
  const outer = around();
  const { origin, pathname, search } = (outer ?? window).location;
  return `${origin}${pathname}${search}#${outer ? "attnmon&" : ""}${KEY}=${encodeURIComponent(view)}`;
}
