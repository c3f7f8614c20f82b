//! Fuzz targets for the main channel.

use hotlift_wire::main_channel::postcopy::PostcopyCommand;
use hotlift_wire::main_channel::{
    DeviceLengths, DeviceStateEvent, DeviceStateStep, EofSearch, MainDecoder, MainEvent, Step,
    VmDescription, next_device_state,
};
use hotlift_wire::{PAGE_SIZE, limits};

use crate::memory::{at_the_end, bounded};

/// Returns the allocation limit for an input, in bytes. The decoder keeps a copy of names and numbers, and returns a
/// further copy.
const fn memory(input: &[u8]) -> usize {
    (64 << 10) + 64 * input.len()
}

/// Decodes the input twice: as a whole, and in small pieces.
///
/// The first byte selects how the lengths of device states are found: by prefixes, or by the VM description (JSON) at
/// the end of the input.
pub fn read(data: &[u8]) {
    let Some((&[first], data)) = data.split_first_chunk() else {
        return;
    };
    let lengths = match first % 2 {
        0 => DeviceLengths::LengthPrefixed,
        _ => {
            let text = VmDescription::find(data);
            let parsed = text.map(|text| bounded(memory(data), || VmDescription::parse(text)));
            match parsed {
                Some(Ok(description)) => DeviceLengths::Description(description),
                _ => return,
            }
        }
    };
    at_the_end(data, |data| {
        let mut whole = MainDecoder::new(lengths.clone()).taking_postcopy();
        let mut trickling = MainDecoder::new(lengths).taking_postcopy();
        bounded(memory(data), || both(&mut whole, &mut trickling, data));
    });
}

fn both(whole: &mut MainDecoder, trickling: &mut MainDecoder, mut rest: &[u8]) {
    loop {
        let step = whole.next(rest);
        let mut given = 0;
        let slow = loop {
            match trickling.next(&rest[..given]) {
                Ok(Step::Need(more)) => {
                    assert!(more > 0, "needs nothing, and says nothing");
                    if given == rest.len() {
                        break Ok(Step::Need(more));
                    }
                    given = rest.len().min(given + more);
                }
                other => break other,
            }
        };
        match (step, slow) {
            (Ok(step), Ok(slow)) => {
                assert_eq!(step, slow);
                let Step::Event { event, consumed } = step else {
                    return;
                };
                let is_empty = matches!(
                    event,
                    MainEvent::DevicePayload([]) | MainEvent::SectionFooter
                );
                assert!(consumed > 0 || is_empty, "no way on from {event:?}");
                assert!(consumed <= limits::MAIN_RECORD);
                check(&event, whole);
                rest = &rest[consumed..];
            }
            (Err(_), Err(_)) => return,
            (step, slow) => panic!("{step:?} as a whole, {slow:?} bit by bit"),
        }
    }
}

fn check(event: &MainEvent<'_>, decoder: &MainDecoder) {
    let blocks = decoder.blocks();
    match event {
        MainEvent::RamPage { block, offset, .. } => {
            let end = offset.checked_add(PAGE_SIZE as u64).expect("a page");
            assert!(
                end <= blocks[*block].used_length,
                "a page outside its block"
            );
            assert!(offset.is_multiple_of(PAGE_SIZE as u64));
        }
        MainEvent::Postcopy(PostcopyCommand::Discard { block, ranges }) => {
            for (start, length) in ranges.iter() {
                let end = start.checked_add(length).expect("a range");
                assert!(end <= blocks[*block].used_length, "outside its block");
            }
        }
        MainEvent::RamBlocks(list) => {
            assert_eq!(list, blocks);
            assert!(list.len() <= limits::RAM_BLOCKS);
            let bytes = list.iter().map(|block| u128::from(block.used_length));
            assert!(bytes.sum::<u128>() <= u128::from(limits::RAM));
        }
        _ => {}
    }
}

/// Decodes the stream after RAM: device state between two Hotlifts, and the end of a QEMU's stream.
pub fn tail(data: &[u8]) {
    at_the_end(data, |data| bounded(memory(data), || read_tail(data)));
}

fn read_tail(data: &[u8]) {
    let mut rest = data;
    while let Ok(DeviceStateStep::Event(event, consumed)) = next_device_state(rest) {
        assert!(consumed > 0);
        rest = &rest[consumed..];
        match event {
            DeviceStateEvent::Part { sections, .. } => {
                assert!(sections.len() <= limits::DEVICE_PART);
            }
            DeviceStateEvent::Ping(_) => {}
            DeviceStateEvent::Eof => break,
        }
    }
    // The end must be found at the same offset if the input arrives in two parts.
    let whole = EofSearch::default().find(data);
    let mut search = EofSearch::default();
    search.find(&data[..data.len() / 2]);
    let passed_on = search.before();
    search.passed_on(passed_on);
    let parts = search.find(&data[passed_on..]);
    assert_eq!(whole, parts.map(|eof| passed_on + eof));
}
