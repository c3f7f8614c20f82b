//! Tests the initial content of RAM (the fill).

use std::collections::HashSet;
use std::fs;

use hotlift_mem::{Backing, PAGE_SIZE, RamBlock};
use hotlift_vmm::fill::{FillError, FillSettings, FillSource, fill, write_fill};
use hotlift_vmm::layout::Layout;

const RAM: u64 = 32 << 20;

fn layout() -> Layout {
    Layout::new(RAM, 1, Some(64 << 10)).unwrap()
}

fn ram() -> RamBlock {
    RamBlock::new("ram", usize::try_from(RAM).unwrap(), Backing::Shared).unwrap()
}

/// Returns the pages of the filled range of RAM filled with `settings`.
fn filled_pages(settings: &FillSettings) -> Vec<[u8; PAGE_SIZE]> {
    let (ram, layout) = (ram(), layout());
    fill(&ram, &layout, settings).unwrap();
    let first = usize::try_from(layout.filled().start).unwrap();
    (first..ram.len())
        .step_by(PAGE_SIZE)
        .map(|at| {
            let mut page = [0; PAGE_SIZE];
            ram.read(at, &mut page).unwrap();
            page
        })
        .collect()
}

fn is_zero(page: &[u8; PAGE_SIZE]) -> bool {
    page.iter().all(|&byte| byte == 0)
}

fn generated(zero_share: f64) -> FillSettings {
    FillSettings {
        source: FillSource::Generated,
        zero_share,
        zero_touched: false,
        seed: 5,
    }
}

#[test]
fn the_share_of_zero_pages_is_what_was_asked_for() {
    for share in [0.0, 0.1, 0.5, 0.9, 0.999, 1.0] {
        let pages = filled_pages(&generated(share));
        let zeros = pages.iter().filter(|page| is_zero(page)).count();
        #[allow(clippy::cast_precision_loss)]
        let difference = zeros as f64 - share * pages.len() as f64;
        assert!(
            difference.abs() <= 1.0,
            "{share}: {zeros} of {}",
            pages.len()
        );
    }
}

#[test]
fn zero_pages_come_alone_and_in_runs() {
    let pages = filled_pages(&generated(0.5));
    let mut runs = HashSet::new();
    for run in pages
        .chunk_by(|a, b| is_zero(a) == is_zero(b))
        .filter(|run| is_zero(&run[0]))
    {
        runs.insert(run.len());
    }
    assert!(
        runs.contains(&1) && runs.iter().any(|&run| run > 30),
        "{runs:?}"
    );
}

#[test]
fn zero_pages_are_touched_only_if_asked_for() {
    for zero_touched in [false, true] {
        let (ram, layout) = (ram(), layout());
        let settings = FillSettings {
            zero_touched,
            ..generated(0.5)
        };
        let filled = fill(&ram, &layout, &settings).unwrap();
        let first = usize::try_from(layout.filled().start).unwrap() / PAGE_SIZE;
        let pages = ram.pages() - first;
        let mut untouched = vec![0; pages.div_ceil(64)];
        if !ram.untouched(first, pages, &mut untouched).unwrap() {
            hotlift_testkit::skip!("pagemap", "this kernel does not report untouched pages");
            return;
        }
        let untouched: u32 = untouched.iter().map(|word| word.count_ones()).sum();
        let expected = if zero_touched { 0 } else { filled.zero_pages };
        assert_eq!(u64::from(untouched), expected);
    }
}

#[test]
fn a_seed_fills_the_same_and_another_seed_does_not() {
    let one = filled_pages(&generated(0.2));
    assert!(one == filled_pages(&generated(0.2)));
    assert!(
        one != filled_pages(&FillSettings {
            seed: 6,
            ..generated(0.2)
        })
    );
}

#[test]
fn a_generated_fill_compresses_like_memory_of_a_server() {
    let bytes = filled_pages(&generated(0.0)).concat();
    let packed = zstd::encode_all(bytes.as_slice(), 1).unwrap();
    let percent = bytes.len() * 100 / packed.len();
    assert!((200..400).contains(&percent), "ratio {percent} %");
}

/// Distinguishes pages of text from incompressible ones by their ratios.
#[test]
fn a_mixed_fill_is_half_text_and_half_incompressible_in_runs() {
    let settings = FillSettings {
        source: FillSource::Mixed,
        ..generated(0.0)
    };
    // Several times the total of one run of each length.
    let layout = Layout::new(256 << 20, 1, Some(64 << 10)).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    write_fill(file.path(), &layout, &settings).unwrap();
    let bytes = fs::read(file.path()).unwrap();
    let is_text = |page: &&[u8]| page.iter().all(u8::is_ascii);
    let pages: Vec<&[u8]> = bytes.chunks(PAGE_SIZE).skip(16).collect();
    let (text, noise): (Vec<&[u8]>, Vec<&[u8]>) = pages.iter().partition(|page| is_text(page));
    let percent = text.len() * 100 / pages.len();
    assert!((40..=60).contains(&percent), "{percent} % of text");
    // By packets, as in a migration.
    let ratio = |pages: &[&[u8]]| {
        let packed = |packet: &[&[u8]]| {
            zstd::encode_all(packet.concat().as_slice(), 1)
                .unwrap()
                .len()
        };
        pages.len() * PAGE_SIZE * 100 / pages.chunks(128).map(packed).sum::<usize>()
    };
    let (text, noise) = (ratio(&text[..4096]), ratio(&noise[..4096]));
    assert!((250..=350).contains(&text), "ratio of text {text} %");
    assert!(noise <= 100, "ratio of the rest {noise} %");
    let runs: Vec<usize> = pages
        .chunk_by(|a, b| is_text(a) == is_text(b))
        .map(<[_]>::len)
        .collect();
    let of =
        |lengths: std::ops::Range<usize>| runs.iter().filter(|run| lengths.contains(run)).count();
    let (short, middle, long) = (of(16..64), of(64..512), of(512..4096));
    assert!(short.min(middle).min(long) > runs.len() / 6, "{runs:?}");
    assert!(
        runs[..runs.len() - 1]
            .iter()
            .all(|run| (16..4096).contains(run))
    );
    let other = tempfile::NamedTempFile::new().unwrap();
    write_fill(other.path(), &layout, &settings).unwrap();
    assert!(
        bytes == fs::read(other.path()).unwrap(),
        "a seed fills the same"
    );
}

/// Returns an image of `pages` pages: each fourth is zero, the others contain their number.
fn image(pages: usize) -> Vec<u8> {
    (0..pages)
        .flat_map(|number| match number % 4 {
            0 => [0; PAGE_SIZE],
            _ => {
                let mut page = [0x20; PAGE_SIZE];
                page[..8].copy_from_slice(&(number as u64).to_le_bytes());
                page
            }
        })
        .collect()
}

fn of_image(path: &std::path::Path) -> FillSettings {
    FillSettings {
        source: FillSource::Image(path.to_owned()),
        // Ignored for images.
        zero_share: 0.9,
        zero_touched: false,
        seed: 5,
    }
}

/// Pages of the working set have blank records.
const BLANK: usize = 16;

/// Returns how many of `pages` differ from `image`.
fn different(pages: &[[u8; PAGE_SIZE]], image: &[u8]) -> usize {
    let pages = pages.iter().zip(image.chunks(PAGE_SIZE));
    pages.filter(|(page, of_image)| page != of_image).count()
}

#[test]
fn an_image_is_placed_page_by_page_with_its_own_zero_pages() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let pages = usize::try_from(layout().filled_pages()).unwrap();
    for (of_file, packed) in [(pages, false), (pages + 1000, false), (pages, true)] {
        let bytes = image(of_file);
        let path = path.with_extension(if packed { "zst" } else { "raw" });
        let packed = packed.then(|| zstd::encode_all(bytes.as_slice(), 1).unwrap());
        fs::write(&path, packed.as_ref().unwrap_or(&bytes)).unwrap();
        let filled = filled_pages(&of_image(&path));
        assert!(different(&filled, &bytes) <= BLANK);
        let filled = fill(&ram(), &layout(), &of_image(&path)).unwrap();
        assert_eq!(filled.zero_pages, (pages as u64).div_ceil(4));
        #[allow(clippy::cast_precision_loss)]
        let copies = pages as f64 / of_file as f64;
        assert!((filled.copies - copies).abs() < 1e-9, "{}", filled.copies);
    }
}

#[test]
fn an_image_smaller_than_ram_is_repeated_without_equal_pages() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    // Its last page is incomplete.
    let bytes = image(1024);
    fs::write(&path, &bytes[..bytes.len() - 100]).unwrap();
    let pages = filled_pages(&of_image(&path));
    assert!(different(&pages[..1023], &bytes) <= BLANK);
    let content: Vec<_> = pages.iter().filter(|page| !is_zero(page)).collect();
    let zero = pages.len() - content.len();
    assert!(
        zero.abs_diff(pages.len() / 4) < 300,
        "{zero} of {}",
        pages.len()
    );
    let different: HashSet<_> = content.iter().collect();
    assert_eq!(different.len(), content.len());
    let filled = fill(&ram(), &layout(), &of_image(&path)).unwrap();
    assert!((7.0..9.0).contains(&filled.copies), "{}", filled.copies);
    let file = folder.path().join("fill");
    assert_eq!(
        write_fill(&file, &layout(), &of_image(&path)).unwrap(),
        filled
    );
}

#[test]
fn an_empty_or_missing_image_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let error = fill(&ram(), &layout(), &of_image(&path)).unwrap_err();
    assert!(error.to_string().contains("image"), "{error}");
    fs::write(&path, "").unwrap();
    let error = fill(&ram(), &layout(), &of_image(&path)).unwrap_err();
    assert!(matches!(error, FillError::Empty { .. }), "{error}");
    let error = fill(&ram(), &layout(), &of_image(folder.path())).unwrap_err();
    assert!(matches!(error, FillError::File(_)), "{error}");
}

#[test]
fn a_file_has_the_bytes_of_the_ram() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fill");
    let (ram, layout) = (ram(), layout());
    let in_ram = fill(&ram, &layout, &generated(0.4)).unwrap();
    let in_file = write_fill(&path, &layout, &generated(0.4)).unwrap();
    assert_eq!(in_ram, in_file);
    let mut bytes = vec![0; ram.len() - usize::try_from(layout.filled().start).unwrap()];
    ram.read(usize::try_from(layout.filled().start).unwrap(), &mut bytes)
        .unwrap();
    assert!(fs::read(&path).unwrap() == bytes);
}

/// Returns lines of equal length; half of each equals the previous line's.
fn text(start: u64) -> Vec<u8> {
    let noise = |n: u64| n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    (start..start + 40_000)
        .flat_map(|n| format!("line {n} {:08x}\n", noise(n) ^ noise(n * n)).into_bytes())
        .collect()
}

/// Creates a folder of 2.5 MB of text without a repeated page, in three files, one compressed, one nested.
fn corpus() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a"), text(300_000)).unwrap();
    let packed = zstd::encode_all(text(100_000).as_slice(), 3).unwrap();
    fs::write(folder.path().join("b.zst"), packed).unwrap();
    fs::create_dir(folder.path().join("c")).unwrap();
    fs::write(folder.path().join("c/d"), text(200_000)).unwrap();
    folder
}

fn from(folder: &tempfile::TempDir) -> FillSettings {
    FillSettings {
        source: FillSource::Folder(folder.path().to_owned()),
        zero_share: 0.0,
        zero_touched: false,
        seed: 1,
    }
}

#[test]
fn the_files_of_a_folder_are_read_in_order_and_unpacked() {
    let folder = corpus();
    // Records blank bytes within the working set; the rest must be the text itself.
    let layout = Layout::new(RAM, 1, Some(4096)).unwrap();
    let ram = ram();
    fill(&ram, &layout, &from(&folder)).unwrap();
    let mut bytes = vec![0; 3 * text(100_000).len()];
    ram.read(usize::try_from(layout.filled().start).unwrap(), &mut bytes)
        .unwrap();
    let text = String::from_utf8_lossy(&bytes);
    let at = |line: &str| {
        text.find(line)
            .unwrap_or_else(|| panic!("{line:?} is missing"))
    };
    assert!(at("line 339999 ") < at("line 100000 "));
    assert!(at("line 139999 ") < at("line 200000 "));
    assert!(text.contains("line 239999 "));
}

#[test]
fn a_repeated_corpus_has_no_equal_pages_and_compresses_no_better() {
    let folder = corpus();
    let pages = filled_pages(&from(&folder));
    let in_corpus = (3 * text(100_000).len()).div_ceil(PAGE_SIZE);
    assert!(pages.len() > 4 * in_corpus, "the corpus was repeated");
    let distinct: HashSet<_> = pages.iter().collect();
    assert_eq!(distinct.len(), pages.len());

    // Each repetition alone compresses as well as the corpus; all together no better than each alone.
    let size = |pages: &[[u8; PAGE_SIZE]]| zstd::encode_all(&*pages.concat(), 1).unwrap().len();
    let first = size(&pages[..in_corpus]);
    for repetition in pages.chunks_exact(in_corpus).skip(1) {
        let here = size(repetition);
        assert!(here.abs_diff(first) * 50 < first, "{here} against {first}");
    }
    let three = size(&pages[..3 * in_corpus]);
    assert!(
        three.abs_diff(3 * first) * 50 < 3 * first,
        "{three} against {first} three times"
    );
}

#[test]
fn an_unreadable_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (ram, layout) = (ram(), layout());
    let attempt = |settings: &FillSettings| fill(&ram, &layout, settings).unwrap_err();
    assert!(matches!(attempt(&from(&folder)), FillError::Empty { .. }));
    fs::write(folder.path().join("broken.zst"), b"not packed").unwrap();
    match attempt(&from(&folder)) {
        FillError::File(file) => assert!(file.path.ends_with("broken.zst")),
        other => panic!("{other}"),
    }
    let share = FillSettings {
        zero_share: 1.5,
        ..FillSettings::default()
    };
    assert!(matches!(attempt(&share), FillError::ZeroShare { .. }));
}
