//! The main channel: all of the stream, except pages that are sent on multifd channels.
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
//! [`MainDecoder`] accepts only this order, and [`MainEncoder`] writes it. START of `ram` comes once, PART only between START
//! and END, EOF only after END. Early FULL sections may precede END, and even START. Those of QEMU have no length; the decoder
//! reads them with [`taking_early_sections`](MainDecoder::taking_early_sections).
//!
//! In a `mapped-ram` file the START section of `ram` is different: [`MappedRamDecoder`] reads it, and [`MappedLayout`] writes
//! it.
//!
//! Postcopy adds [`PostcopyCommand`](postcopy::PostcopyCommand)s. DISCARD follows the PARTs of precopy, then PACKAGED with the
//! devices, then the PARTs with requested pages; END and EOF are last. The decoder reads them with
//! [`taking_postcopy`](MainDecoder::taking_postcopy).
//!
//! COLO, RDMA and iterable devices other than `ram` are not supported. Each causes an error that names it.

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
