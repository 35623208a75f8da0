"""What the pages say is there: links, anchors, flags, numbers with their results. And their sentences are short."""

import re
from functools import cache

from colossal_vit.launch.flags import get_parser
from PIL import Image

from checkout import FILES, PAGES, pages
from fork_ranks import ROOT

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
IMAGE = re.compile(r'<img (?:align="right" )?src="([^"]+)" width="(\d+)" alt="([^"]+)">')


def prose(page):
    """A page without its code blocks, comments and pictures."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"<!--.*?-->|</?p>|<img [^>]*>", "", text, flags=re.DOTALL)


@cache
def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(LINK, "", heading).lower()).replace(" ", "-") for heading in headings}


@pages
def test_links_lead_somewhere(page):
    """Each names a tracked file or a folder with such files, and each anchor a heading of its page."""
    for link in LINK.findall(page.read_text()):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target in FILES or any(target in path.parents for path in FILES), link
        assert not anchor or anchor in anchors(target), link


@pages
def test_pictures_fit_their_page_and_say_what_they_show(page):
    """Those of docs/pictures are shown at half their size, which is sharp on dense screens."""
    text = page.read_text()
    images = IMAGE.findall(text)
    assert text.count("<img") + text.count("![") == len(images)
    for source, width, words in images:
        path = (page.parent / source).resolve()
        assert path in FILES, source
        assert int(width) <= 640, source
        assert path.parent.name != "pictures" or Image.open(path).width == 2 * int(width), source
        assert len(words.split()) >= 8, words


def test_every_picture_is_on_a_page():
    shown = {(page.parent / source).resolve() for page in PAGES for source, _, _ in IMAGE.findall(page.read_text())}
    assert {path for path in FILES if path.parent.name == "pictures"} <= shown


def test_every_page_is_linked_from_the_readme_or_its_list_of_pages():
    lists = [ROOT / "README.md", ROOT / "docs/README.md"]
    linked = {(at.parent / link.partition("#")[0]).resolve() for at in lists for link in LINK.findall(at.read_text())}
    assert not {page for page in PAGES if page != lists[0]} - linked


def own_flags():
    return {flag for action in get_parser()._actions for flag in action.option_strings if flag.startswith("--")}


def test_every_flag_is_on_the_page():
    """`--local-rank` is what torch.distributed.launch passes."""
    (table,) = re.findall(r"^## Flags\n(.+?)^## ", (ROOT / "docs/launching.md").read_text(), re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"--[a-z][\w-]*", table)) == own_flags() - {"--help", "--local-rank"}


OTHERS = {  # flags of other programs that the pages name, by who has them
    "tools/planner": {"--machine", "--spec"},
    "bash": {
        "--cu12",
        "--fast",
        "--rehearse",
        "--check",
        "--cases",
        "--seed",
        "--torchrun",
        "--dali",
        "--rest",
        "--from",
    },
    "build_tfrecords.py": {"--verify", "--check", "--index-only", "--synset-map", "--test-fraction"},
    "scripts/bench.py": {"--before", "--synthetic", "--find-batch-size"},
    "python -m colossal_vit.checkpoint": {"--dtype", "--img-size", "--num-classes", "--ema", "--onnx", "--images"},
    "python -m colossal_vit.predict": {"--top", "--ema", "--attention"},
    "scripts": {"--only", "--write", "--accumulation", "--list", "--optimizer"},
    "python -m tools.parity": {"--own-precision"},
    "earlier versions": {"--plan", "--parity", "--eval-knn", "--minutes", "--again", "--tf32"},
    "tests/stress": {"--cases", "--seed", "--ignore"},
    "torchrun": {"--standalone", "--nnodes", "--rdzv_backend", "--rdzv_endpoint", "--max-restarts", "--nproc_per_node"},
    "its rendezvous": {"--rdzv_conf"},
    "SLURM": {
        "--nodes",
        "--ntasks",
        "--ntasks-per-node",
        "--gpus-per-node",
        "--pty",
        "--requeue",
        "--partition",
        "--account",
    },
    "pip": {"--no-deps"},
    "scripts/clusters": {"--restarts"},
    "torch.distributed.launch": {"--master_addr", "--master_port"},
    "timm": {
        *("--device", "--model", "--pretrained", "--initial-checkpoint", "--img-size", "--gp", "--grad-accum-steps"),
        *(
            "--opt",
            "--lr",
            "--lr-base",
            "--weight-decay",
            "--layer-decay",
            "--clip-grad",
            "--epochs",
            "--warmup-epochs",
        ),
        *("--sched", "--min-lr", "--smoothing", "--bce-loss", "--mixup", "--cutmix", "--aa", "--color-jitter"),
        *("--reprob", "--scale", "--hflip", "--drop", "--drop-path", "--mean", "--std", "--model-ema"),
        *("--model-ema-decay", "--amp", "--amp-dtype"),
    },
    "mmpretrain": {"--work-dir", "--cfg-options"},
}


@pages
def test_flag_named_on_a_page_exists(page):
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text()))
    assert not named - own_flags() - set().union(*OTHERS.values())


# ---------------------------------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------------------------------

THOUSANDS = re.compile(r"(?<![\w.,-])\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\w|[.,]\d)")
NUMBER = re.compile(
    rf"{THOUSANDS.pattern}|" r"(?<![\w.,-])\d+(?:\.\d+)?e-\d+|(?<![\w.,])\d+\.\d+(?![\w.]|,\d)|(?<![\w.,])\d+(?= ?%)"
)
SUFFIXES = (".md", ".json", ".txt", ".log")  # of the files of a result that numbers may be from
# Numbers in a paragraph or row with a result that are from elsewhere.
ELSEWHERE = {
    "README.md": {"6,144"},  # GPUs, in the row of those that others ran on
    "docs/benchmarks.md": {"1,000"},  # the lines of the log
    "docs/checkpoints.md": {"3.7"},  # GB, in the result MB
    "docs/imagenet-data.md": {"6.3", "2.2"},  # published; GB, in the result MB
}


@cache
def numbers_of(folder):
    """The text of a result, without spaces before % signs and commas in thousands."""
    texts = [path.read_text() for path in FILES if folder in path.parents and path.suffix in SUFFIXES]
    return without_commas(re.sub(r" (?=%)", "", "\n".join(texts)))


def without_commas(text):
    return THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)


def passages(page):
    """Paragraphs, items of lists and rows of tables."""
    return re.split(r"\n\n|\n(?=[|-])", prose(page))


@pages
def test_numbers_beside_a_result_are_in_it(page):
    """Fractions, percentages, powers and thousands, in each passage that links to a folder of results/."""
    for passage in passages(page):
        linked = [(page.parent / link).resolve() for link in LINK.findall(passage) if "results/" in link]
        folders = [path if path.is_dir() else path.parent for path in linked]
        said = NUMBER.findall(re.sub(r"\]\([^)]*\)|`[^`]*`", "", passage)) if folders else []
        for number in set(said) - ELSEWHERE.get(str(page.relative_to(ROOT)), set()):
            whole = rf"(?<![\d.]){re.escape(without_commas(number))}(?![\d])"
            assert any(re.search(whole, numbers_of(folder)) for folder in folders), f"{number} in: {passage}"


# ---------------------------------------------------------------------------------------------------------------------
# Sentences
# ---------------------------------------------------------------------------------------------------------------------

LONGEST = 30  # words


def sentences(page):
    """The sentences of a page; each cell of a table, item of a list and heading is one or more of its own."""
    text = re.sub(r"\]\([^)]*\)", "]", prose(page))
    for block in re.split(r"\n\n|\n(?=[|#-]|\d\.)|\|", text):
        yield from re.split(r"(?<=[.!?:;])\**\s+", " ".join(block.split()))


@pages
def test_sentence_on_a_page_is_short(page):
    if page.name == "configuration.md":
        return  # written from the schema
    long = [sentence for sentence in sentences(page) if len(re.findall(r"[^\s]*\w[^\s]*", sentence)) > LONGEST]
    assert not long, "\n".join(long)
