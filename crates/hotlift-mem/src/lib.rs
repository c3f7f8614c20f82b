//! Guest memory for live migration, in addition to vm-memory's mapping types.
//!
//! | file | part of the data path |
//! |---|---|
//! | `ram_block` | maps guest memory under its name on the wire |
//! | `populate` | allocates memory before its pages arrive |
//! | `userfault` | loads pages when the guest touches them |
//! | `dirty_bitmap` | marks dirty pages, and returns them to the sending threads |
//! | `untouched` | lists never written pages without reading them, with the kernel's help |
//! | `numa` | finds the NUMA node of memory |
//! | `zero` | detects zero pages |
//! | `guest_run` | copies guest memory in and out |
//! | `stream_copy` | writes pages that are not read soon, with stores that bypass the caches |
//! | `sock`, `splice` | send pages to a socket, or receive them, without a copy |
//! | `forward` | forwards pages from socket to socket without a copy |
//!
//! `stdio` is here because its code runs before `main`, which needs `unsafe`; `error_line`, `lock` and `wait` are shared by all
//! crates.
//!
//! # Sharing memory with a running guest
//!
//! The guest writes while its pages are read, so this crate never creates a `&[u8]` or `&mut [u8]` to guest memory: a reference
//! would promise the compiler that the bytes do not change. Guest bytes are accessed only through raw pointers: by copies,
//! vector loads and system calls whose result is a private value. A concurrent write may tear the read: the result is then a
//! mix of old and new bytes. This is harmless because every caller keeps an order: it fetches and clears a page's dirty bit
//! *before* it reads the page. A write that tears the read marks the page again, so it is sent again.
//!
//! # Example
//!
//! ```
//! use hotlift_mem::{Backing, DirtyBitmap, PAGE_SIZE, RamBlock};
//!
//! let ram = RamBlock::new("pc.ram", 16 * PAGE_SIZE, Backing::Private)?;
//! ram.write(3 * PAGE_SIZE, b"a guest wrote this")?;
//!
//! let dirty = DirtyBitmap::new(ram.pages());
//! dirty.set(3);
//! assert_eq!(dirty.take_word(0), 1 << 3); // fetched and cleared, and only then read:
//! let mut page = [0; PAGE_SIZE];
//! ram.read(3 * PAGE_SIZE, &mut page)?;
//! assert!(page.starts_with(b"a guest wrote this"));
//! assert_eq!(dirty.count(), 0);
//! # Ok::<_, hotlift_mem::MemError>(())
//! ```

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("hotlift-mem needs 64-bit Linux");

mod cpu_time;
mod dirty_bitmap;
mod error;
mod error_line;
mod file_error;
mod forward;
mod guest_run;
mod heap;
mod lock;
mod numa;
mod populate;
mod ram_block;
pub mod sock;
mod splice;
mod stdio;
mod stream_copy;
mod tcp_info;
mod untouched;
mod userfault;
mod wait;
pub mod zero;

pub use cpu_time::{RunQueue, thread_cpu_time};
pub use dirty_bitmap::DirtyBitmap;
pub use error::MemError;
pub use error_line::error_line;
pub use file_error::FileError;
pub use forward::Forwarder;
pub use guest_run::GuestRun;
pub use heap::give_back_freed_memory;
pub use lock::lock;
pub use ram_block::{Backing, RamBlock, ram_blocks_of};
pub use splice::Splicer;
pub use stdio::stdout_was_closed;
pub use userfault::{Fault, MissingPages, Placed, Touch, UserfaultSupport, probe_userfault};
pub use wait::{end_of_process, is_readable, poll_until, wait_readable};

/// Bytes of a guest page, the unit of dirty logging and of the stream (QEMU's target page on x86
/// and most others).
pub const PAGE_SIZE: usize = 4096;
