//! Zero-page detection by DSA.

use std::path::Path;

#[cfg(feature = "simulated")]
use hotlift_accel::idxd::simulated;
use hotlift_accel::idxd::zero::{PageResult, ZeroBatch, ZeroFinder};
use hotlift_accel::idxd::{CpuFeatures, queue};
use hotlift_mem::GuestRun;

use super::{FindZeros, Found, PageBatch};
use crate::figures::JobFigures;
use crate::options::AccelPath;

/// Opens the DSA devices of `paths`, for guest memory on NUMA node `home`.
pub(super) fn find(paths: &[AccelPath], home: Option<u32>) -> Found {
    let (mut devices, mut missing) = (Vec::new(), None);
    for path in paths {
        let opened = match path {
            AccelPath::Dsa(path) => queue::open(Path::new("/"), path, CpuFeatures::of_this_cpu()),
            #[cfg(feature = "simulated")]
            AccelPath::DsaModel { behaviour, .. } => simulated::open(*behaviour),
        };
        match opened {
            Ok(device) => devices.push(device),
            Err(error) => missing = missing.or(Some(error.into())),
        }
    }
    let any = !devices.is_empty();
    let finder = any.then(|| Box::new(ZeroFinder::new(devices, home)) as _);
    (finder, missing)
}

impl FindZeros for ZeroFinder {
    fn batch<'a>(&'a self, pages: usize) -> Box<dyn PageBatch<'a> + 'a> {
        Box::new(self.batch(pages))
    }

    fn listen(&self) {
        self.listen();
    }

    fn close(&self) {
        self.close();
    }

    fn figures(&self) -> JobFigures {
        let jobs = self.jobs();
        JobFigures {
            hardware: jobs.hardware,
            software: jobs.software,
            retries: jobs.retries,
            raw_pages: 0,
            devices: self.names(),
            fallback: self.out_of_service().into_iter().next(),
        }
    }
}

impl<'a> PageBatch<'a> for ZeroBatch<'a> {
    fn submit(&mut self, pages: &[(u64, GuestRun<'a>)]) {
        for (_, page) in pages {
            self.push(*page);
        }
        self.submit();
    }

    fn wait(&mut self, pages: &[(u64, GuestRun<'a>)], are_zero: &mut Vec<bool>) {
        let mut pages = pages.iter();
        self.wait(|result| {
            let page = pages.next();
            are_zero.push(match result {
                PageResult::Zero => true,
                PageResult::Normal => false,
                PageResult::CheckFrom(at) => {
                    page.is_some_and(|(_, page)| page.split_at(at).1.is_zero())
                }
            });
        });
    }
}
