//! Damaged pages of a file, and the undamaged ones.

use super::*;
use crate::ends::file::LostPages;
use crate::pipe::batch::BATCH_PAGES;

/// Returns all pages of RAM block 0 as an eager restore reads them, and the lost pages.
fn salvage(path: &Path) -> (Vec<u8>, Vec<LostPages>) {
    let mut file = BlockFile::open(path).unwrap();
    file.salvage();
    let (limits, control) = (Limits::default(), Control::default());
    let memory = limits.memory(0);
    let mut blocks = Blocks::new(file.seed(), &memory, &control);
    let mut contents = vec![0; PAGES];
    for first in (0..PAGES).step_by(BATCH_PAGES) {
        let mut batch = Batch::new();
        batch.start(0);
        let pages = first..PAGES.min(first + BATCH_PAGES);
        file.fill(&mut blocks, &mut batch, 0, pages).unwrap();
        let pages = batch.pages().as_chunks::<PAGE_SIZE>().0;
        for (offset, got) in batch.normal.iter().zip(pages) {
            assert!(*got == page(got[1]), "page at {offset}");
            contents[usize::try_from(*offset).unwrap() / PAGE_SIZE] = got[1];
        }
    }
    (contents, file.lost())
}

#[test]
fn only_pages_of_damaged_parts_are_lost_and_each_is_named() {
    let folder = folder();
    let path = folder.path().join("vm");
    let expected = save(&path, "zstd");
    let whole = fs::read(&path).unwrap();
    let file = BlockFile::open(&path).unwrap();
    let in_block = file.entry(0, 520).unwrap().unwrap().position;
    let in_index = file.index_position(0, PAGES - 1);
    let (low, high) = ((9, 16), (512, PAGES));
    let low_block = file.entry(0, low.0).unwrap().unwrap().position;
    for (damaged, lost) in [
        (vec![in_block], vec![(520, 528)]),
        (vec![in_index], vec![high]),
        (vec![low_block, in_index], vec![low, high]),
    ] {
        let mut bytes = whole.clone();
        for position in &damaged {
            bytes[usize::try_from(*position).unwrap() + 40] ^= 4;
        }
        fs::write(&path, bytes).unwrap();
        assert!(read(&BlockFile::open(&path).unwrap(), 0).is_err());
        let (got, lost_parts) = salvage(&path);
        let of_damaged: Vec<u64> = lost_parts
            .iter()
            .flat_map(|lost| lost.offsets.clone())
            .collect();
        let is_lost = |page: &usize| of_damaged.contains(&((page * PAGE_SIZE) as u64));
        for page in 0..PAGES {
            let is_in = lost
                .iter()
                .any(|(first, end)| (*first..*end).contains(&page));
            assert!(is_in || !is_lost(&page), "page {page} of {damaged:?}");
            let content = if is_lost(&page) { 0 } else { expected[page] };
            assert_eq!(got[page], content, "page {page} of {damaged:?}");
        }
        let parts: Vec<u64> = lost_parts.iter().map(|lost| lost.position).collect();
        assert_eq!(parts, damaged);
        assert!(
            lost_parts
                .iter()
                .all(|lost| lost.block == "ram" && !lost.offsets.is_empty())
        );
    }
}

#[test]
fn a_damaged_part_of_the_index_is_read_once() {
    let folder = folder();
    let path = folder.path().join("vm");
    save(&path, "zstd");
    let at = BlockFile::open(&path).unwrap().index_position(0, 0);
    let mut bytes = fs::read(&path).unwrap();
    bytes[usize::try_from(at).unwrap() + 40] ^= 4;
    fs::write(&path, &bytes).unwrap();
    let file = BlockFile::open(&path).unwrap();
    let error = file.entry(0, 0).unwrap_err().to_string();
    // A later read detects that the content is gone.
    fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|file| file.set_len(at))
        .unwrap();
    for page in 0..3 {
        assert_eq!(file.entry(0, page).unwrap_err().to_string(), error);
    }
}
