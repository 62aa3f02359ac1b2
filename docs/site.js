// The site's switch between light and dark turns the pictures too, which by themselves go by the system's setting.
const turn = () => {
  const dark = document.body.getAttribute("data-md-color-scheme") === "slate";
  for (const source of document.querySelectorAll("picture source")) source.media = dark ? "all" : "not all";
};
turn();
new MutationObserver(turn).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
