//! The main channel: everything but the pages that travel on multifd channels.
//!
//! ```text
//! header  configuration  [commands]
//! START ram: block list, [flush], EOS                          footer
//! PART  ram: page records, [flush], EOS                        footer   any number of times
//! [SWITCHOVER_START]
//! END   ram: page records, EOS                                 footer
//! FULL  device: payload                                        footer   one a device
//! EOF  VM description
//! ```
//!
//! [`MainDecoder`] reads this order and no other: START of `ram` once, PART only between it and END,
//! EOF only after END. Early FULL sections may precede END, START too; a QEMU's have no length, and are read if
//! [asked for](MainDecoder::taking_early_sections). [`MainEncoder`] writes it.
//!
//! A `mapped-ram` file has another `ram` section, which [`MappedRamDecoder`] reads and
//! [`MappedLayout`] writes.
//!
//! With postcopy [`PostcopyCommand`](postcopy::PostcopyCommand)s come between: DISCARD behind the PARTs of precopy, then
//! PACKAGED with the devices, then the PARTs of pages that are asked for; END and EOF close it. The decoder reads
//! them if [asked to](MainDecoder::taking_postcopy).
//!
//! Of QEMU's format this leaves out COLO, RDMA and iterable devices other than
//! `ram`; each ends in an error that names it.

mod command;
mod configuration;
mod decode;
mod description;
mod device_state;
mod early;
mod encode;
mod global_state;
mod mapped_ram;
pub mod postcopy;
mod ram;
mod section;

pub use command::Command;
pub use configuration::{Configuration, FILE_HEADER, MACHINE_PAGE_BITS, MAPPED_RAM};
pub use decode::{MainDecoder, MainEvent, Step};
pub use description::{DeviceLengths, VmDescription};
pub use device_state::{
    DeviceStateEvent, DeviceStateStep, EOF_WITHOUT_DESCRIPTION, EofSearch, next_device_state,
    put_device_part_head, put_packaged_head,
};
pub use early::{EarlyLengths, EarlySection, PluggableMemory};
pub use encode::MainEncoder;
pub use global_state::RunStateSearch;
pub use mapped_ram::{
    MappedBlock, MappedEvent, MappedLayout, MappedRamDecoder, MappedStep, WITHOUT_MAPPED_RAM,
    put_mapped_end,
};
pub use ram::PageContent;
pub use section::SectionKind;
