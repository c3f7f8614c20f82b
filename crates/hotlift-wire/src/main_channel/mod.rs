//! The main channel: everything except the pages on multifd channels.
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
//! [`MainDecoder`] accepts only this order: START of `ram` once, PART only between it and END, EOF only after END. Early FULL
//! sections may precede END, and even START; QEMU's have no length, and are read with
//! [`taking_early_sections`](MainDecoder::taking_early_sections). [`MainEncoder`] writes this order.
//!
//! A `mapped-ram` file has a different `ram` section, which [`MappedRamDecoder`] reads and [`MappedLayout`] writes.
//!
//! Postcopy adds [`PostcopyCommand`](postcopy::PostcopyCommand)s: DISCARD after the PARTs of precopy, PACKAGED with the
//! devices, then the PARTs of requested pages; END and EOF close the stream. The decoder reads them with
//! [`taking_postcopy`](MainDecoder::taking_postcopy).
//!
//! COLO, RDMA and iterable devices other than `ram` are not supported; each causes an error that names it.

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
