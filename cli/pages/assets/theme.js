// Light and dark: as the system says, until the reader says otherwise.

/** A button that switches between light and dark; `onchange` is called when the colours have changed. */
function themeButton(onchange = () => {}) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const button = element("button", { type: "button", class: "plain no-print", onclick: () => change(!isDark()) });
  const show = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
    onchange();
  };
  const change = (dark) => {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    show();
  };
  system.addEventListener("change", show);
  show();
  return button;
}

/** A colour of `common.css` as a canvas takes it: `colour("--chosen")`. */
function colour(name) {
  const probe = element("span", { hidden: true });
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
